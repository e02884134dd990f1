"""Bytes that an HLO instruction moves: of a slice, only the slice."""

import functools
import math
import re
from typing import NamedTuple

from jaxmem.analysis._hlo import Computation, Instruction, Module

_ARRAY = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_BITS = re.compile(r"[a-z]+(\d+)")
_SPACE = re.compile(r"S\((\d+)\)")
HOST_SPACE = 5  # the other numbers are on-chip memories, which cost no bandwidth worth counting

# These name a value and move nothing.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier add-dependency "
    "domain".split()
)
_TRANSPARENT = frozenset(("bitcast", "reshape", "convert", "copy"))
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))


class Traffic(NamedTuple):
    """Bytes moved to and from device memory, and to and from the host."""

    device: float = 0
    host: float = 0

    def plus(self, other: "Traffic", factor: float = 1) -> "Traffic":
        return Traffic(self.device + other.device * factor, self.host + other.host * factor)


def array_bytes(type_text: str) -> list[Traffic]:
    """Bytes of each array of a type, in order; those in on-chip memory count nothing."""
    sizes = []
    for dtype, dimensions, layout in _ARRAY.findall(type_text):
        space = _SPACE.search(layout)
        size = _product(dimensions) * item_bits(dtype) / 8
        on_chip = space is not None and int(space.group(1)) != HOST_SPACE
        sizes.append(Traffic() if on_chip else Traffic(host=size) if space else Traffic(device=size))
    return sizes


def full_bytes(type_text: str) -> float:
    """Bytes of a type, tuples summed, wherever they lie."""
    return sum(_product(dimensions) * item_bits(dtype) / 8 for dtype, dimensions, _ in _ARRAY.findall(type_text))


def type_bytes(type_text: str) -> Traffic:
    """Bytes of a type, tuples summed; what lies in on-chip memory is left out.

    >>> type_bytes("(bf16[4,8]{1,0:T(8,128)(2,1)}, f32[2]{0:S(1)}, pred[3]{0:S(5)})")
    Traffic(device=64.0, host=3.0)
    """
    return functools.reduce(Traffic.plus, array_bytes(type_text), Traffic())


def item_bits(dtype: str) -> int:
    """Bits of one element: 16 for `bf16`, 8 for `pred` and `f8e4m3fn`, 0 for a token."""
    if dtype == "pred":
        return 8
    bits = _BITS.match(dtype)
    return int(bits.group(1)) if bits else 0


def started_bytes(instruction: Instruction) -> Traffic:
    """What a `copy-start` or `slice-start` moves: the destination's bytes, at either end.

    >>> start = "(f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)})"
    >>> started_bytes(Instruction("c", start, "copy-start", "%x)", False))
    Traffic(device=32.0, host=0.0)
    """
    arrays = [found.group() for found in _ARRAY.finditer(instruction.type)][:2]
    if len(arrays) < 2:
        return Traffic()
    size = min(full_bytes(array) for array in arrays)
    ends = [type_bytes(array) for array in arrays]
    return Traffic(device=size * sum(end.device > 0 for end in ends), host=size * any(end.host > 0 for end in ends))


class Traffics:
    """Bytes moved by the instructions of a module; what is found out about a fusion is kept."""

    def __init__(self, module: Module):
        self.module = module
        self._fusions: dict[str, tuple[list[float], float]] = {}

    def of(self, computation: Computation, instruction: Instruction) -> Traffic:
        """What it reads and writes."""
        operands = [computation.instructions.get(name) for name in instruction.operands]
        sizes = [type_bytes(operand.type) if operand else Traffic() for operand in operands]
        out = type_bytes(instruction.type)
        shares, written = [1.0] * len(sizes), 1.0
        if instruction.opcode == "fusion":
            reads, written = self._fusion(instruction.attribute("calls") or "")
            shares = [reads[i] if i < len(reads) else 1.0 for i in range(len(sizes))]
        elif instruction.opcode in _SLICES and sizes:
            shares[0] = _ratio(_elements(instruction.type), _elements(operands[0].type) if operands[0] else 0)
        elif instruction.opcode == "dynamic-update-slice" and len(sizes) > 1 and operands[1]:
            shares[0], written = 0.0, _ratio(_elements(operands[1].type), _elements(instruction.type))
        elif instruction.opcode == "scatter" and len(sizes) > 2 and operands[2]:
            written = _ratio(_elements(operands[2].type), _elements(instruction.type))
            shares[0] = written
        total = Traffic().plus(out, written)
        for size, share in zip(sizes, shares, strict=True):
            total = total.plus(size, share)
        return total

    def _fusion(self, name: str) -> tuple[list[float], float]:
        """The share of each parameter that the fused computation reads, and of its output that it writes."""
        known = self._fusions.get(name)
        if known is not None:
            return known
        self._fusions[name] = ([], 1.0)  # nothing calls itself, but the text may be anything
        fused = self.module.computations.get(name)
        if fused is None or fused.root is None:
            return self._fusions[name]
        users: dict[str, list[tuple[Instruction, int]]] = {}
        for user in fused.instructions.values():
            for position, operand in enumerate(user.operands):
                users.setdefault(operand, []).append((user, position))
        reads: dict[int, float] = {}
        for parameter in fused.instructions.values():
            if parameter.opcode == "parameter" and parameter.literal.isdigit():
                elements = _elements(parameter.type)
                read = self._read(fused, users, parameter, elements, 0)
                reads[int(parameter.literal)] = _ratio(min(read, elements), elements)
        written = _ratio(_written(fused, fused.root, 0), _elements(fused.root.type))
        self._fusions[name] = ([reads.get(i, 1.0) for i in range(max(reads, default=-1) + 1)], written)
        return self._fusions[name]

    def _read(self, fused: Computation, users: dict, value: Instruction, full: float, depth: int) -> float:
        """Elements of `value`, itself of `full` elements, that its users need."""
        total = 0.0
        for user, position in users.get(value.name, []):
            if user.opcode in _SLICES and position == 0:
                total += _elements(user.type)
            elif user.opcode == "dynamic-update-slice" and position == 0:
                continue  # written in place
            elif user.opcode in _TRANSPARENT and depth < 20 and not user.is_root:
                total += self._read(fused, users, user, full, depth + 1)
            elif user.opcode == "fusion":
                reads, _ = self._fusion(user.attribute("calls") or "")
                total += full * (reads[position] if position < len(reads) else 1.0)
            else:
                return full
            if total >= full:
                return full
        return total


def _written(fused: Computation, value: Instruction, depth: int) -> float:
    """Elements that a root writes: of an update in place, those of the update."""
    operands = [fused.instructions.get(name) for name in value.operands]
    first = operands[0] if operands else None
    if value.opcode == "tuple":
        return sum(_written(fused, operand, depth + 1) for operand in operands if operand)
    if value.opcode == "dynamic-update-slice" and len(operands) > 1 and operands[1]:
        return _elements(operands[1].type)
    if value.opcode in _TRANSPARENT and first is not None and depth < 20:
        return min(_elements(value.type), _written(fused, first, depth + 1))
    return _elements(value.type)


def _elements(type_text: str) -> float:
    """Elements of all arrays of a type."""
    return sum(_product(dimensions) for _, dimensions, _ in _ARRAY.findall(type_text))


def _product(dimensions: str) -> int:
    return math.prod(int(d.lstrip("<=")) for d in dimensions.split(",") if d)


def _ratio(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 1.0
