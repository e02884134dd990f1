"""`Assignment`: a choice for every block with what it costs, and those that take no solver.

Among these are what JAX's built-in policies keep, so that a search that tries them is never worse than they are, and
scans run in segments, which keep less than one input a layer.
"""

import dataclasses
import math
from collections.abc import Callable

from jaxmem.remat._nested_pricing import segment_lengths
from jaxmem.remat.auto._candidates import Choice
from jaxmem.remat.auto._costs import Cost
from jaxmem.remat.auto._problem import Problem
from jaxmem.remat.auto._solve import Group

_SHORTEST = 4  # steps of a scan that is worth segments


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """A choice for every block.

    Args:
      choices: by the block's name.
      kept_bytes: by all blocks and outside of them, on the device; modelled.
      outside_bytes: of these, outside of blocks and by the last block: freed before the others are differentiated.
      end_bytes: what is kept outside of blocks, and all that the last block's backward pass reads.
      host_bytes: in host memory.
      working_bytes: of the block with the largest working set.
      recompute_flops, recompute_seconds: what runs a second time.
      price: of the objective.
      bound: a lower bound of prices within the same bytes; 0 where none was proven.
      segments: lengths of the segments in which scans are run, by the name of the block that is their body.
    """

    choices: dict[str, Choice]
    kept_bytes: int
    outside_bytes: int
    end_bytes: int
    host_bytes: int
    working_bytes: int
    recompute_flops: float
    recompute_seconds: float
    price: float
    bound: float
    segments: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """What a budget bounds: the most that is there at once of kept values and working sets, modelled."""
        return self.kept_bytes - self.outside_bytes + max(self.end_bytes, self.working_bytes)

    @property
    def gap(self) -> float:
        """How far the price may be from the cheapest, as a share of it."""
        return 0.0 if self.price <= 0 else max(0.0, (self.price - self.bound) / self.price)


def assignment_of(problem: Problem, members, price: float, bound: float) -> Assignment:
    """What choices cost together.

    Args:
      problem: the blocks.
      members: per group, how many of its members take which choice.
      price, bound: as of `Assignment`.
    """
    left = [dict(each) for each in members]
    choices = {}
    for name, at in problem.group_of.items():
        choice = next(c for c, count in left[at].items() if count)
        left[at][choice] -= 1
        choices[name] = choice
    pairs = [
        (group, choice, count)
        for group, each in zip(problem.groups, members, strict=True)
        for choice, count in each.items()
        if count
    ]
    total = lambda of: sum(of(g.candidates, c) * g.times * n for g, c, n in pairs)  # noqa: E731
    of_last = lambda of: problem.base_bytes + sum(of(g.candidates, c) for g, c, _ in pairs if g.last)  # noqa: E731
    return Assignment(
        choices=choices,
        outside_bytes=of_last(lambda c, choice: c.kept_bytes(choice)),
        end_bytes=of_last(lambda c, choice: c.end_bytes(choice)),
        kept_bytes=problem.base_bytes + total(lambda c, choice: c.kept_bytes(choice)),
        host_bytes=total(lambda c, choice: int(c.value_bytes[list(choice.offloaded)].sum())),
        working_bytes=max((g.candidates.working_bytes(c) for g, c, _ in pairs), default=0),
        recompute_flops=total(lambda c, choice: c.recompute_flops(choice)),
        recompute_seconds=total(lambda c, choice: float(c.seconds[c.recomputed(choice)].sum())),
        price=price,
        bound=min(price, bound),
    )


def smallest(problem: Problem, *, objective: str = "seconds", end: str = "inputs") -> Assignment:
    """What keeps the least: of each block no more than its inputs; of the last what `end` says, as of `Limits`."""
    least = lambda g: g.candidates.ending(end if g.last else "inputs")  # noqa: E731
    return uniform(problem, least, objective=objective)


def leasts(problem: Problem, objective: str) -> dict[str, Assignment]:
    """What keeps the least, by what the last block keeps (see `Limits`): everything, as it is written, comes first.

    It keeps its products alone only where its backward pass needs the most by the model. What a rule round it saves
    there, and what it takes, only a compile can tell.
    """
    full, again = (smallest(problem, objective=objective, end=end) for end in ("everything", "inputs"))
    if full.choices == again.choices:
        return {"everything": full}
    products = smallest(problem, objective=objective, end="products")
    binds = full.end_bytes > full.working_bytes and products.choices not in (full.choices, again.choices)
    return {"everything": full, **({"products": products} if binds else {}), "inputs": again}


def plain(problem: Problem, *, objective: str = "seconds") -> Assignment:
    """What keeps everything."""
    return uniform(problem, lambda group: group.candidates.plain, objective=objective)


def uniform(problem: Problem, kind: Callable[[Group], Choice], *, objective: str = "seconds") -> Assignment:
    """One choice for all blocks of a group."""
    choices = [kind(group) for group in problem.groups]
    return assigned(problem, {name: choices[at] for name, at in problem.group_of.items()}, objective=objective)


def assigned(problem: Problem, choices: dict[str, Choice], *, objective: str = "seconds") -> Assignment:
    """Given choices, by the block's name, with what they cost."""
    members: list[dict[Choice, int]] = [{} for _ in problem.groups]
    for name, choice in choices.items():
        counts = members[problem.group_of[name]]
        counts[choice] = counts.get(choice, 0) + 1
    price = sum(
        group.times * count * group.candidates.price(choice, objective)
        for group, counts in zip(problem.groups, members, strict=True)
        for choice, count in counts.items()
    )
    return dataclasses.replace(assignment_of(problem, members, price, 0.0), choices=dict(choices))


def standard(problem: Problem, *, objective: str = "seconds") -> dict[str, Assignment]:
    """By name, "full", "dots_no_batch", "dots", "none"; what follows the last block keeps everything."""
    kinds = {
        "full": lambda c: c.least,
        "dots_no_batch": lambda c: c.products(batched=False),
        "dots": lambda c: c.products(),
        "none": lambda c: c.plain,
    }

    def chosen(kind) -> Assignment:
        left = lambda g: g.candidates.plain if g.last else kind(g.candidates)  # noqa: E731
        return uniform(problem, left, objective=objective)

    return {name: chosen(kind) for name, kind in kinds.items()}


def repriced(problem: Problem, assignment: Assignment, *, objective: str) -> Assignment:
    """The same choices, priced by an objective."""
    found = assigned(problem, assignment.choices, objective=objective)
    if assignment.segments:
        found = in_segments(problem, found, assignment.segments, objective=objective)
    same = abs(found.price - assignment.price) <= 1e-9 * abs(found.price)
    return dataclasses.replace(found, bound=assignment.bound) if same else found


def nested(problem: Problem, least: Assignment, *, objective: str = "seconds") -> Assignment | None:
    """What keeps the least, with every scan of N blocks in segments of about sqrt(N), of which each keeps its first
    input; None without scans.

    While a segment is differentiated it keeps an input a layer, and runs twice more: once for those inputs, and each
    layer once for its own backward pass. After Chen et al. 2016 (https://arxiv.org/abs/1604.06174).
    """
    segments = {}
    for name, length in problem.scans.items():
        if name not in problem.group_of:
            continue
        must_not_run_again = problem.groups[problem.group_of[name]].candidates.fixed.any()
        if length >= _SHORTEST and not must_not_run_again:
            segments[name] = segment_lengths(length, "sqrt", None)
    if not segments:
        return None
    return in_segments(problem, least, segments, objective=objective)


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
