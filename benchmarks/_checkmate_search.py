"""The lowest peak whose schedule recomputes at most so much: the program of kept values under a rising peak.

Starts from a peak that nothing is below, and rises until the relaxed program says that the recomputation could be low
enough. There the program is solved. Where that takes too long, a schedule is found under a much higher peak, and being
over the low one has a price: the two are lowered together window by window, all choices staying but those of some
neighbouring layers, or of some neighbouring stages. Meanwhile the low peak rises slowly, until it is met.
"""

import dataclasses
import time

from benchmarks._checkmate_graph import Graph
from benchmarks._checkmate_program import Answer, Program
from benchmarks._checkmate_replay import replay
from benchmarks._checkmate_stages import cut_stages, lay_out, least_peak_bytes

# What a stage's gradients may read together, as a share of the largest operation's bytes: the first whose program has
# no more than so many choices, or the last.
AT_ONCE = (0.4, 0.5)
CHOICES = 1800
# A program that is not solved in so many seconds is improved by windows instead.
WHOLE_SECONDS = 8.0
WINDOW_SECONDS = 3.0
WINDOW_LAYERS = 28
WINDOW_STAGES = 6
SMALLEST = 7
# The peak rises by so much at a time, and so often while there is time.
RISE = 1.01
RISES = 5
# Relaxed, the program must recompute so much less than is allowed: otherwise it hardly ever has a solution.
HOPE = 0.75
# Being over the peak by all of it, in one stage, costs so many forward passes.
OVER_PRICE = 5.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Attributes:
    schedule: operations by index, with repeats.
    peak_bytes, recomputed_flops: for a batch of one, found by running the schedule.
    seconds: of the search.
    """

    schedule: tuple[int, ...]
    peak_bytes: int
    recomputed_flops: int
    seconds: float


def lowest_peak(graph: Graph, *, recompute: float = 1.0, seconds: float = 100.0) -> Plan:
    """A schedule of low peak that recomputes at most `recompute` of the forward pass's FLOPs.

    Args:
        graph: of a training step.
        recompute: a share; gradients run once.
        seconds: after so many the peak rises fast, and what there is soon fits.
    """
    started = time.perf_counter()
    for share in AT_ONCE:
        stages = cut_stages(graph, share * graph.largest_operation_bytes)
        if sum(stage.reach + 1 for stage in stages) <= CHOICES:
            break
    program = Program(graph, stages)
    peak = float(least_peak_bytes(graph))
    while program.solve(peak, seconds=WHOLE_SECONDS, relaxed=True).least > HOPE * recompute:
        peak *= RISE
    best = program.solve(peak, seconds=WHOLE_SECONDS, stop_at=recompute)
    if best.recomputed > recompute:
        best = _by_windows(program, peak, recompute, started, seconds)
    assert best.kept is not None
    schedule = lay_out(graph, stages, best.kept)
    found = replay(graph, schedule)
    return Plan(
        schedule=tuple(schedule),
        peak_bytes=found.peak_bytes,
        recomputed_flops=found.recomputed_flops,
        seconds=time.perf_counter() - started,
    )


def _by_windows(program: Program, lowest: float, recompute: float, started: float, seconds: float) -> Answer:
    """A schedule under a peak as little above `lowest` as time allows."""
    easy = 1.5 * lowest
    while (best := program.solve(easy, seconds=WHOLE_SECONDS, stop_at=recompute)).recomputed > recompute:
        easy *= 1.25
    begun = time.perf_counter() - started
    best = dataclasses.replace(best, cost=float("inf"))
    left: list[tuple[range, range]] = []
    while best.cost > best.recomputed + 1e-6 or best.recomputed > recompute:
        spent = time.perf_counter() - started
        share = (spent - begun) / (seconds - begun) if spent < seconds else 1.0
        rises = RISES * share + max(0.0, spent - seconds) / WINDOW_SECONDS
        left = left or _windows(program)
        values, stages = left.pop(0)
        found = program.solve(
            lowest * RISE**rises,
            seconds=WINDOW_SECONDS,
            near=best.kept,
            free=lambda s, i, values=values, stages=stages: i in values and s in stages,
            over_price=OVER_PRICE,
            below=0.9999 * best.cost if best.cost < float("inf") else None,
        )
        if found.kept is not None:
            best = found
            left.append((values, stages))
        elif found.seconds > WINDOW_SECONDS:
            left += _halves(values, stages, len(program.stages))
    return best


def _halves(values: range, stages: range, all_stages: int) -> list[tuple[range, range]]:
    """The two halves of a window of layers or of stages, unless they are small."""
    if len(stages) == all_stages:
        half = len(values) // 2
        return [(values[:half], stages), (values[half:], stages)] if half >= SMALLEST else []
    half = (len(stages) + 1) // 2
    return [(values, stages[half:]), (values, stages[:half])] if half >= 2 else []


def _windows(program: Program) -> list[tuple[range, range]]:
    """(values, stages): from the last stages to the first, then from the first layers to the last."""
    values, stages = program.graph.forward, len(program.stages)
    layers, spans = WINDOW_LAYERS // 2, WINDOW_STAGES // 2
    by_stage = ((range(values), range(s, s + WINDOW_STAGES)) for s in range(stages - spans, -spans, -spans))
    by_layer = ((range(i, i + WINDOW_LAYERS), range(stages)) for i in range(-layers, values, layers))
    return [*by_stage, *by_layer]
