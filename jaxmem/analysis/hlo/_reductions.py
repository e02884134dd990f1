"""How often a compiled program reduces its gradients between devices, and how many bytes that is."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxmem.analysis.hlo._collectives import group_size
from jaxmem.analysis.hlo._module import Computation, Instruction, Module
from jaxmem.analysis.hlo._types import Array, arrays
from jaxmem.analysis.hlo._walk import CALLS, Walk, plus

_REDUCTIONS = ("all-reduce", "reduce-scatter")
# What hands an array on as it is, or in another order.
_PASSING = ("bitcast", "copy", "reshape", "transpose", "convert")


class Reductions(NamedTuple):
    """Reductions of gradients in one call of a program.

    Args:
      times: how often, on average over the elements of all gradients.
      size_bytes: of one device, that are reduced in all.
    """

    times: float
    size_bytes: int


def gradient_reductions(module: Module, shapes: Sequence[tuple[int, ...]], devices: int) -> Reductions:
    """Reductions of arrays with as many elements as a gradient, or as a layer's part of one, loops multiplied out.

    A program does not say what an all-reduce is for: gradients are told by their number of elements. Compilers change
    shapes, and those of GPUs join several arrays to one. Scalars are left out.

    Args:
      shapes: of the gradients, on one device.
      devices: that hold the same parameters, and among which their gradients are reduced.
    """
    sizes = {math.prod(shape) for shape in shapes} | {math.prod(shape[1:]) for shape in shapes if len(shape) > 1}
    total = sum(math.prod(shape) for shape in shapes)

    def run(computation: Computation) -> _Reduced:
        found = _Reduced()
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode.removesuffix("-start") in _REDUCTIONS:
                if group_size(instruction) in (None, devices):
                    found = plus(found, _reduced(module, computation, instruction, sizes - {1}))
            elif opcode in CALLS:
                found = plus(found, walk.called(computation, instruction))
        return found

    walk = Walk(module, _Reduced(), run, size=lambda reduced: reduced.size_bytes)
    found = walk.computation(module.entry or "")
    return Reductions(times=found.elements / total if total else 0.0, size_bytes=found.size_bytes)


class _Reduced(NamedTuple):
    elements: int = 0
    size_bytes: int = 0


def _reduced(module: Module, computation: Computation, reduction: Instruction, sizes: set[int]) -> _Reduced:
    """What a reduction sums of arrays with one of the `sizes`, in elements."""
    parts = [part for name in reduction.operands for part in _parts(module, computation, name, sizes)]
    chosen = [part for part in parts if part.elements in sizes]
    return _Reduced(sum(part.elements for part in chosen), sum(part.size_bytes for part in chosen))


def _parts(module: Module, computation: Computation, name: str, sizes: set[int]) -> Sequence[Array]:
    """The arrays that were joined to the value `name`, or its own."""
    value = computation.instructions.get(name)
    own = arrays(value.type) if value else ()
    if own and own[0].elements in sizes:
        return own
    made, inside = computation.maker(value, _PASSING), computation
    if made is not None and made.opcode == "fusion":
        inside = module.callee(made) or computation
        made = inside.maker(inside.root, _PASSING)
    if made is None or made.opcode != "concatenate":
        return own
    joined = [inside.instructions.get(operand) for operand in made.operands]
    return [array for part in joined if part for array in arrays(part.type)]
