"""What a schedule needs, found by running it: bytes alive and FLOPs spent, operation by operation.

Knows nothing of how the schedule was found.
"""

import dataclasses
from collections.abc import Sequence

from benchmarks._checkmate_graph import Graph


@dataclasses.dataclass(frozen=True, kw_only=True)
class Replay:
    """Attributes:
    peak_bytes: the most that was alive at once, for a batch of one, without what is fixed.
    recomputed_flops: what was spent on operations that had run before.
    """

    peak_bytes: int
    recomputed_flops: int


def replay(graph: Graph, schedule: Sequence[int], *, hold_all: bool = False) -> Replay:
    """Runs the operations in the schedule's order; one that runs again makes its value anew.

    A value is alive from the operation that makes it until the last that reads it before it is made again. While an
    operation runs, its inputs and its output are alive together.

    Args:
        graph: of a training step.
        schedule: operations by index, with repeats.
        hold_all: keep the forward pass's values until the end instead.

    Raises:
        ValueError: an operation reads what is not there, or one never runs.

    Example:
        >>> from benchmarks._checkmate_graph import training_step
        >>> chain = Graph(names=("a", "b"), inputs=((), (0,)), bytes=(8, 4), flops=(3, 5), forward=2)
        >>> replay(training_step(chain), [0, 1, 2, 3, 4])
        Replay(peak_bytes=24, recomputed_flops=0)
    """
    if missing := set(range(len(graph.names))) - set(schedule):
        raise ValueError(f"wanted: every operation; got none of {[graph.names[i] for i in sorted(missing)]}")
    last_read: list[dict[int, int]] = [{} for _ in graph.names]  # by value: run that made it → step that reads it last
    made: dict[int, int] = {}
    for step, op in enumerate(schedule):
        for one in graph.inputs[op]:
            if one not in made:
                raise ValueError(f"wanted: {graph.names[one]} before {graph.names[op]}, step {step}")
            last_read[one][made[one]] = step
        made[op] = step
    alive: set[int] = set()
    peak = recomputed = 0
    ran: set[int] = set()
    for step, op in enumerate(schedule):
        recomputed += graph.flops[op] if op in ran else 0
        ran.add(op)
        made[op] = step
        alive.add(op)
        peak = max(peak, sum(graph.bytes[i] for i in alive))
        for one in (*graph.inputs[op], op):
            done = last_read[one].get(made[one], made[one]) <= step
            if done and not (hold_all and one < graph.forward):
                alive.discard(one)
    return Replay(peak_bytes=peak, recomputed_flops=recomputed)
