"""Bytes that an HLO instruction moves: of a slice, only the slice."""

import functools
import re
from typing import NamedTuple

from jaxmem.analysis.hlo._module import Computation, Instruction, Module
from jaxmem.analysis.hlo._types import arrays
from jaxmem.analysis.hlo._walk import plus

_DEVICE, _HOST = 0, 5  # the other numbers are on-chip memories, which cost no bandwidth worth counting

# These name a value and move nothing.
FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all partition-id replica-id opt-barrier add-dependency "
    "domain".split()
)
FUSIONS = frozenset(("fusion", "fusion-start"))
_TRANSPARENT = frozenset(("bitcast", "reshape", "convert", "copy"))
_SLICES = frozenset(("dynamic-slice", "slice", "gather"))
_READ_IN_PART = _SLICES | {"dynamic-update-slice", "fusion"}
_LIBRARY = re.compile(r'custom_call_target="__cu')


class Traffic(NamedTuple):
    """Bytes moved to and from device memory, and to and from the host."""

    device: float = 0
    host: float = 0


@functools.lru_cache(maxsize=65536)
def type_bytes(type_text: str) -> Traffic:
    """Bytes of a type, tuples summed; what lies in on-chip memory is left out.

    >>> type_bytes("(bf16[4,8]{1,0:T(8,128)(2,1)}, f32[2]{0:S(1)}, pred[3]{0:S(5)})")
    Traffic(device=64, host=3)
    """
    found = arrays(type_text)
    return Traffic(*(sum(a.size_bytes for a in found if a.memory_space == space) for space in (_DEVICE, _HOST)))


def started_bytes(instruction: Instruction) -> Traffic:
    """What a `copy-start` or `slice-start` moves: the destination's bytes, at either end.

    >>> start = "(f32[8]{0:S(1)}, f32[8]{0}, u32[]{:S(2)})"
    >>> started_bytes(Instruction("c", start, "copy-start", "%x)", False))
    Traffic(device=32, host=0)
    """
    ends = arrays(instruction.type)[:2]
    if len(ends) < 2:
        return Traffic()
    size, spaces = min(end.size_bytes for end in ends), [end.memory_space for end in ends]
    return Traffic(device=size * spaces.count(_DEVICE), host=size * (_HOST in spaces))


def _output_bytes(instruction: Instruction) -> Traffic:
    """What it writes, without the workspace of a library's call: room that cuBLAS and cuDNN may use, hardly do, and
    that their calls have as a vector of bytes after the results.

    >>> text = 'custom_call_target="__cublas$gemm"'
    >>> _output_bytes(Instruction("g", "(f32[8,8]{1,0}, s8[33554432]{0})", "custom-call", text, False))
    Traffic(device=256, host=0)
    """
    if instruction.opcode != "custom-call" or not _LIBRARY.search(instruction.rest):
        return type_bytes(instruction.type)
    written = Traffic()
    for number, array in enumerate(arrays(instruction.type)):
        if number == 0 or len(array.sizes) != 1 or array.dtype not in ("s8", "u8"):
            written = plus(written, type_bytes(array.text))
    return written


class Traffics:
    """Bytes moved by the instructions of a module; what is found out about a fusion is kept."""

    def __init__(self, module: Module):
        self.module = module
        self._fusions: dict[str, tuple[list[float], float]] = {}

    def of(self, computation: Computation, instruction: Instruction) -> Traffic:
        """What it reads and writes."""
        operands = [computation.instructions.get(name) for name in instruction.operands]
        sizes = [type_bytes(operand.type) if operand else Traffic() for operand in operands]
        out = _output_bytes(instruction)
        shares, written = [1.0] * len(sizes), 1.0
        if instruction.opcode in FUSIONS:
            fused = self.module.callee(instruction)
            reads, written = self._fusion(fused)
            if instruction.opcode == "fusion-start" and fused is not None and fused.root is not None:
                out = type_bytes(fused.root.type)  # its own type holds the operands as well
            shares = [reads[i] if i < len(reads) else 1.0 for i in range(len(sizes))]
        elif instruction.opcode in _SLICES and sizes:
            shares[0] = _ratio(_elements(instruction.type), _elements(operands[0].type) if operands[0] else 0)
        elif instruction.opcode == "dynamic-update-slice" and len(sizes) > 1 and operands[1]:
            shares[0], written = 0.0, _ratio(_elements(operands[1].type), _elements(instruction.type))
        elif instruction.opcode == "scatter" and len(sizes) > 2 and operands[2]:
            written = _ratio(_elements(operands[2].type), _elements(instruction.type))
            shares[0] = written
        total = plus(Traffic(), out, written)
        for size, share in zip(sizes, shares, strict=True):
            total = plus(total, size, share)
        return total

    def _fusion(self, fused: Computation | None) -> tuple[list[float], float]:
        """The share of each parameter that the fused computation reads, and of its output that it writes."""
        if fused is None or fused.root is None:
            return [], 1.0
        known = self._fusions.get(fused.name)
        if known is not None:
            return known
        self._fusions[fused.name] = ([], 1.0)  # no program calls itself, but a text may be anything
        reads: dict[int, float] = {}
        # In most fusions nothing reads a part of its operand: then who uses what is not looked for.
        parts = any(i.opcode in _READ_IN_PART for i in fused.instructions.values())
        users = _users(fused) if parts else {}
        for name in users:
            parameter = fused.instructions[name]
            if parameter.opcode == "parameter":
                elements = _elements(parameter.type)
                read = self._read(users, parameter, elements, 0)
                reads[int(parameter.literal)] = _ratio(min(read, elements), elements)
        written = _ratio(_written(fused, fused.root, 0), _elements(fused.root.type))
        self._fusions[fused.name] = ([reads.get(i, 1.0) for i in range(max(reads, default=-1) + 1)], written)
        return self._fusions[fused.name]

    def _read(self, users: "_Users", value: Instruction, full: float, depth: int) -> float:
        """Elements of `value`, itself of `full` elements, that its users need."""
        total = 0.0
        for user, position in users[value.name]:
            if user.opcode in _SLICES and position == 0:
                total += _elements(user.type)
            elif user.opcode == "dynamic-update-slice" and position == 0:
                continue  # written in place
            elif user.opcode in _TRANSPARENT and depth < 20 and not user.is_root:
                total += self._read(users, user, full, depth + 1)
            elif user.opcode == "fusion":
                reads, _ = self._fusion(self.module.callee(user))
                total += full * (reads[position] if position < len(reads) else 1.0)
            else:
                return full
            if total >= full:
                return full
        return total


_Users = dict[str, list[tuple[Instruction, int]]]


def _users(fused: Computation) -> _Users:
    """(user, operand number) of each parameter, and of what only hands one on."""
    found: _Users = {}
    for instruction in fused.instructions.values():
        if instruction.opcode == "parameter":
            if instruction.literal.isdigit():
                found[instruction.name] = []
            continue
        for position, operand in enumerate(instruction.operands):
            if operand in found:
                found[operand].append((instruction, position))
                if instruction.opcode in _TRANSPARENT:
                    found.setdefault(instruction.name, [])
    return found


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


@functools.lru_cache(maxsize=65536)
def _elements(type_text: str) -> int:
    """Elements of all arrays of a type."""
    return sum(array.elements for array in arrays(type_text))


def _ratio(part: float, whole: float) -> float:
    return min(1.0, part / whole) if whole else 1.0
