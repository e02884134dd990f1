"""A training step as a graph of operations, each with the bytes of its output and its FLOPs.

Sizes are those of one image; both grow linearly with the batch. The expansion to a training step follows the
accounting of Checkmate (arXiv:1910.02653, and what its public code makes of a Keras model): a loss after the last
layer, and for each layer one gradient operation of the same size and twice the FLOPs.
"""

import dataclasses
from functools import cached_property


@dataclasses.dataclass(frozen=True, kw_only=True)
class Graph:
    """Operations in an order in which they can run; the first `forward` of them are the forward pass.

    Attributes:
        names: one for each operation.
        inputs: by operation, the operations whose values it reads; all earlier ones.
        bytes: by operation, what its value takes, for a batch of one.
        flops: by operation, for a batch of one.
        forward: how many operations are of the forward pass (their recomputation is what a plan may choose).
        fixed_bytes: what stays whatever the batch: parameters and their gradients.
    """

    names: tuple[str, ...]
    inputs: tuple[tuple[int, ...], ...]
    bytes: tuple[int, ...]
    flops: tuple[int, ...]
    forward: int
    fixed_bytes: int = 0

    @cached_property
    def users(self) -> tuple[tuple[int, ...], ...]:
        """By operation, those that read its value, in order."""
        found: list[list[int]] = [[] for _ in self.names]
        for op, inputs in enumerate(self.inputs):
            for one in inputs:
                found[one].append(op)
        return tuple(map(tuple, found))

    @property
    def forward_flops(self) -> int:
        return sum(self.flops[: self.forward])

    @property
    def largest_operation_bytes(self) -> int:
        """Inputs and output of the operation that needs most: no schedule's peak is lower."""
        return max(size + sum(self.bytes[i] for i in self.inputs[op]) for op, size in enumerate(self.bytes))


def training_step(layers: Graph, *, loss_bytes: int = 4) -> Graph:
    """The layers, a loss that reads the last, and the layers' gradients in reverse.

    The gradient of a layer's output reads that output, the outputs of the layers that read it, and their gradients.
    The gradient of a value that is not read (the last layer's) reads the loss instead.

    Example:
        >>> chain = Graph(names=("a", "b"), inputs=((), (0,)), bytes=(8, 4), flops=(3, 5), forward=2)
        >>> step = training_step(chain)
        >>> step.names
        ('a', 'b', 'loss', 'd b', 'd a')
        >>> step.inputs
        ((), (0,), (1,), (1, 2), (0, 1, 3))
        >>> step.flops
        (3, 5, 0, 10, 6)
    """
    count = layers.forward
    backward = range(count - 1, -1, -1)
    inputs = [*layers.inputs, (count - 1,)]
    for layer in backward:
        users = layers.users[layer] or (count,)
        gradients = tuple(2 * count - user for user in users if user < count)
        inputs.append(tuple(sorted({layer, *users, *gradients})))
    return dataclasses.replace(
        layers,
        names=(*layers.names, "loss", *(f"d {layers.names[i]}" for i in backward)),
        inputs=tuple(inputs),
        bytes=(*layers.bytes, loss_bytes, *(layers.bytes[i] for i in backward)),
        flops=(*layers.flops, 0, *(2 * layers.flops[i] for i in backward)),
        forward=count,
    )
