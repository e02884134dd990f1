"""The lowest peak whose schedule recomputes at most so much: the program of kept values under a rising peak.

Starts from a peak that nothing is below, and rises until the relaxed program says that the recomputation could be low
enough. There the program is solved; where that takes too long, what it found is improved window by window: all choices
stay but those of some neighbouring layers, or of some neighbouring stages. When no window helps, the peak rises a
little, under which the schedule found so far still fits.
"""

import dataclasses
import time
from collections.abc import Iterator

from benchmarks._checkmate_graph import Graph
from benchmarks._checkmate_program import Program
from benchmarks._checkmate_replay import replay
from benchmarks._checkmate_stages import cut_stages, lay_out, least_peak_bytes

# What a stage's gradients may read together, as a share of the largest operation's bytes.
AT_ONCE = 0.4
# The peak rises by so much at a time, and so often while there is time.
RISE = 1.01
RISES = 8
# Relaxed, the program must recompute so much less than is allowed: otherwise it hardly ever has a solution.
HOPE = 0.75
# A program that is not solved in so many seconds is improved by windows instead.
WHOLE_SECONDS = 12.0
WINDOW_SECONDS = 3.0
WINDOW_LAYERS = 28
WINDOW_STAGES = 7


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
        seconds: after so many, the peak rises until what there is fits; the last programs may take a little longer.
    """
    started = time.perf_counter()
    stages = cut_stages(graph, AT_ONCE * graph.largest_operation_bytes)
    program = Program(graph, stages)
    peak = float(least_peak_bytes(graph))
    while program.solve(peak, seconds=WHOLE_SECONDS, relaxed=True).least > HOPE * recompute:
        peak *= RISE
    best = program.solve(peak, seconds=WHOLE_SECONDS, stop_at=recompute)
    while best.kept is None:
        peak *= RISE
        best = program.solve(peak, seconds=WHOLE_SECONDS, stop_at=recompute)
    lowest, windows, left = peak, list(_windows(program)), []
    while best.recomputed > recompute:
        late = time.perf_counter() - started - seconds
        peak = max(peak * RISE if late > 0 else 0, lowest * RISE ** (RISES * (1 + late / seconds)))
        left = left or list(windows)
        values, spans = window = left.pop(0)
        found = program.solve(
            peak,
            seconds=WINDOW_SECONDS,
            near=best.kept,
            free=lambda s, i, values=values, spans=spans: i in values and s in spans,
        )
        if found.recomputed < 0.9999 * best.recomputed:
            best = found
            left.append(window)
    schedule = lay_out(graph, stages, best.kept)
    found = replay(graph, schedule)
    return Plan(
        schedule=tuple(schedule),
        peak_bytes=found.peak_bytes,
        recomputed_flops=found.recomputed_flops,
        seconds=time.perf_counter() - started,
    )


def _windows(program: Program) -> Iterator[tuple[range, range]]:
    """(values, stages): from the last layers to the first, then from the first stages to the last."""
    values, stages = program.graph.forward, len(program.stages)
    half = WINDOW_LAYERS // 2
    for start in range(values - half, -half, -half):
        yield range(start, start + WINDOW_LAYERS), range(stages)
    half = WINDOW_STAGES // 2
    for start in range(0, stages - half, half):
        yield range(values), range(start, start + WINDOW_STAGES)
