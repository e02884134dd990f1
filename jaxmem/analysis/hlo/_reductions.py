"""How often a compiled program reduces its gradients between devices, and how many bytes that is."""

import collections
import math
from collections.abc import Sequence
from typing import NamedTuple

from jaxmem.analysis.hlo._groups import group_size
from jaxmem.analysis.hlo._loops import trip_count
from jaxmem.analysis.hlo._parse import Computation, Instruction, Module
from jaxmem.analysis.hlo._types import arrays

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

    A program does not say what an all-reduce is for, so that arrays are told by their sizes; compilers change shapes,
    and GPUs' also join arrays to one. Scalars are left out.

    Args:
      shapes: of the gradients, on one device.
      devices: that hold the same parameters, and among which their gradients are reduced.
    """
    sizes = {math.prod(shape) for shape in shapes} | {math.prod(shape[1:]) for shape in shapes if len(shape) > 1}
    counter = _Counter(module, sizes - {1}, devices)
    found = counter.computation(module.entry or "")
    total = sum(math.prod(shape) for shape in shapes)
    return Reductions(times=found["elements"] / total if total else 0.0, size_bytes=found["bytes"])


class _Counter:
    """One walk over a module; each computation is counted once, however often it is called."""

    def __init__(self, module: Module, sizes: set[int], devices: int):
        self.module, self.sizes, self.devices = module, sizes, devices
        self._known: dict[str, collections.Counter[str]] = {}

    def computation(self, name: str) -> "collections.Counter[str]":
        if name in self._known:
            return self._known[name]
        total = self._known[name] = collections.Counter()
        computation = self.module.computations.get(name)
        if computation is not None:
            for instruction in computation.instructions.values():
                total.update(self._instruction(computation, instruction))
        return total

    def _instruction(self, computation: Computation, instruction: Instruction) -> "collections.Counter[str]":
        opcode = instruction.opcode
        if opcode.removesuffix("-start") in _REDUCTIONS:
            return self._reduced(computation, instruction)
        if opcode == "while":
            inside = self.computation(instruction.attribute("body") or "")
            trips = trip_count(self.module, computation, instruction) or 1
            return collections.Counter({key: value * trips for key, value in inside.items()})
        if opcode == "conditional":
            return max(
                map(self.computation, instruction.branches), key=lambda c: c["bytes"], default=collections.Counter()
            )
        called = instruction.attribute("calls") or (instruction.attribute("to_apply") if opcode == "call" else None)
        return self.computation(called) if called else collections.Counter()

    def _reduced(self, computation: Computation, instruction: Instruction) -> "collections.Counter[str]":
        found: collections.Counter[str] = collections.Counter()
        group = group_size(instruction)
        if group is not None and group != self.devices:
            return found
        for name in instruction.operands:
            for elements, size_bytes in self._parts(computation, name):
                if elements in self.sizes:
                    found.update(elements=elements, bytes=size_bytes)
        return found

    def _parts(self, computation: Computation, name: str) -> list[tuple[int, int]]:
        """(elements, bytes) of the arrays that were joined to the value `name`, or its own."""
        value = computation.instructions.get(name)
        if value is None:
            return []
        own = [(array.elements, array.size_bytes) for array in arrays(value.type)]
        if own and own[0][0] in self.sizes:
            return own
        made, inside = _made(computation, value), computation
        if made is not None and made.opcode == "fusion":
            inside = self.module.computations.get(made.attribute("calls") or "") or computation
            made = _made(inside, inside.root)
        if made is None or made.opcode != "concatenate":
            return own
        joined = [inside.instructions.get(operand) for operand in made.operands]
        return [(array.elements, array.size_bytes) for part in joined if part for array in arrays(part.type)]


def _made(computation: Computation, value: Instruction | None) -> Instruction | None:
    """What made a value, before it was handed on."""
    while value is not None and value.opcode in _PASSING and value.operands:
        value = computation.instructions.get(value.operands[0])
    return value
