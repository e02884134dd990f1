"""`nested`: fewer bytes than one input a layer, for scans that are long enough to be run in segments."""

import dataclasses
import math

from jaxmem.remat.auto._assign import Assignment, smallest
from jaxmem.remat.auto._costs import Cost
from jaxmem.remat.auto._problem import Problem

_SHORTEST = 4  # steps of a scan that is worth segments


def nested(problem: Problem, *, objective: str = "seconds") -> Assignment | None:
    """Every scan of N blocks in segments of about sqrt(N), of which each keeps its first input; None without scans.

    While a segment is differentiated it keeps an input a layer, and runs twice more: once for those inputs, and each
    layer once for its own backward pass. After Chen et al. 2016 (https://arxiv.org/abs/1604.06174).
    """
    segments = {}
    for name, length in problem.scans.items():
        if name not in problem.group_of:
            continue
        must_not_run_again = problem.groups[problem.group_of[name]].candidates.fixed.any()
        if length >= _SHORTEST and not must_not_run_again:
            segments[name] = (math.isqrt(length - 1) + 1,)
    if not segments:
        return None
    return in_segments(problem, smallest(problem, objective=objective), segments, objective=objective)


def in_segments(
    problem: Problem, least: Assignment, segments: dict[str, tuple[int, ...]], *, objective: str
) -> Assignment:
    """What keeps the least, with scans run in segments."""
    saved, working, again, price = 0, 0, Cost(), 0.0
    for name, (size,) in segments.items():
        c, length = problem.groups[problem.group_of[name]].candidates, problem.scans[name]
        inputs, runs = c.kept_bytes(c.least), c.recomputed(c.least)
        saved += inputs * (length - math.ceil(length / size))
        working = max(working, inputs * size)
        again += Cost(float(c.flops[runs].sum()), float(c.seconds[runs].sum())).times(length)
        price += length * float(c.weights(objective).run[runs].sum())
    return dataclasses.replace(
        least,
        kept_bytes=least.kept_bytes - saved,
        working_bytes=least.working_bytes + working,
        recompute_flops=least.recompute_flops + again.flops,
        recompute_seconds=least.recompute_seconds + again.seconds,
        price=least.price + price,
        segments=segments,
    )
