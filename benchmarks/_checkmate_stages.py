"""The gradients of a training step cut into stages, and the schedule that a choice of kept values means.

The forward pass runs once. Then, stage by stage: what the stage needs and does not have is made again, from what is
kept, in the order of the forward pass; then its gradients run. Between stages, only what is chosen stays. With one
gradient a stage this is the schedule of Checkmate's program (arXiv:1910.02653, section 4.3) whose gradients are never
made twice; with more, a smaller program and what a stage reads is alive together.
"""

import dataclasses
from collections.abc import Iterable

from benchmarks._checkmate_graph import Graph


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stage:
    """Attributes:
    gradients: operations, in order.
    needed: the forward pass's values that they read.
    reach: the last value of the forward pass that this stage or a later one reads.
    """

    gradients: tuple[int, ...]
    needed: frozenset[int]
    reach: int


def cut_stages(graph: Graph, at_once_bytes: float) -> tuple[Stage, ...]:
    """As many gradients a stage as read at most so many bytes of the forward pass's values, and at least one.

    Args:
        graph: of a training step: forward pass, loss, gradients.
        at_once_bytes: for a batch of one; 0 gives each gradient its own stage.
    """
    groups: list[list[int]] = []
    for op in range(graph.forward + 1, len(graph.names)):
        grown = [*groups[-1], op] if groups else [op]
        if groups and sum(graph.bytes[i] for i in reads(graph, grown)) <= at_once_bytes:
            groups[-1] = grown
        else:
            groups.append([op])
    stages, reach = [], -1
    for group in reversed(groups):
        needed = reads(graph, group)
        reach = max(reach, *needed)
        stages.append(Stage(gradients=tuple(group), needed=needed, reach=reach))
    return tuple(reversed(stages))


def reads(graph: Graph, ops: Iterable[int]) -> frozenset[int]:
    """The forward pass's values among the operations' inputs."""
    return frozenset(i for op in ops for i in graph.inputs[op] if i < graph.forward)


def gradients_alive(graph: Graph, op: int) -> frozenset[int]:
    """The loss and the gradients that are alive while gradient `op` runs, itself included, each made once."""
    return frozenset(i for i in range(graph.forward, op + 1) if i == op or (graph.users[i] or (i,))[-1] >= op)


def least_peak_bytes(graph: Graph) -> int:
    """What no schedule is below that makes each gradient once, in reverse: what one reads, and other gradients."""
    peaks = [graph.largest_operation_bytes]
    for op in range(graph.forward + 1, len(graph.names)):
        alive = gradients_alive(graph, op) | set(graph.inputs[op])
        peaks.append(sum(graph.bytes[i] for i in alive))
    return max(peaks)


def lay_out(graph: Graph, stages: tuple[Stage, ...], kept: frozenset[tuple[int, int]]) -> list[int]:
    """The operations in the order in which they run.

    Args:
        graph: of a training step.
        stages: all its gradients.
        kept: (stage, value) for each value that is there when a stage begins.
    """
    by_stage: list[set[int]] = [set() for _ in range(len(stages) + 1)]
    for stage, value in kept:
        by_stage[stage].add(value)
    schedule = list(range(graph.forward + 1))  # with the loss
    for stage, have, after in zip(stages, by_stage, by_stage[1:], strict=False):
        again: set[int] = set()
        waiting = [*stage.needed, *after]
        while waiting:
            value = waiting.pop()
            if value not in have and value not in again:
                again.add(value)
                waiting += graph.inputs[value]
        schedule += [*sorted(again), *stage.gradients]
    return schedule
