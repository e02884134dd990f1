"""What talks to other devices: which instructions do, how many devices they join, and how many bytes they send."""

import math
import re

from jaxmem.analysis.hlo._module import Computation, Instruction, Module
from jaxmem.analysis.hlo._types import full_bytes

# What a ring of n devices sends, in shares of (n - 1) / n of the larger of input and output; without the `-start` and
# `-done` of their asynchronous forms.
_SENT = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 1.0,
    "ragged-all-to-all": 1.0,
    "collective-broadcast": 1.0,
}
_PERMUTE = "collective-permute"
COLLECTIVES = (*_SENT, _PERMUTE)

_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=")
# Newer XLA: over axes of a mesh, of which "'a':(1)2" is a part of size 2.
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}")
_AXIS = re.compile(r"'([^']+)'=(\d+)")
_TAKEN = re.compile(r"'([^']+)'(?::\(\d+\)(\d+))?")
_PARTITIONS = re.compile(r"(?:num_partitions|replica_count)=(\d+)")


def is_collective(opcode: str) -> bool:
    """Whether it talks to other devices.

    >>> is_collective("all-reduce-start"), is_collective("reduce")
    (True, False)
    """
    return opcode.removesuffix("-start") in COLLECTIVES


def group_size(instruction: Instruction) -> int | None:
    """Devices that take part in one group; None where the text names none.

    >>> group_size(Instruction("a", "f32[]", "all-reduce", "%x), replica_groups=[2,4]<=[8]", False))
    4
    >>> group_size(Instruction("a", "f32[]", "all-reduce", "%x), replica_groups=mesh['x'=4,'y'=2] {'x'}", False))
    4
    """
    listed = _LISTED.search(instruction.rest)
    if listed:
        return len(listed.group(1).split(","))
    mesh = _MESH.search(instruction.rest)
    if mesh:
        sizes = {name: int(size) for name, size in _AXIS.findall(mesh.group(1))}
        return math.prod(int(part) if part else sizes.get(name, 1) for name, part in _TAKEN.findall(mesh.group(2)))
    iota = _IOTA.search(instruction.rest)
    return int(iota.group(1).split(",")[-1]) if iota else None


def device_count(module: Module) -> int:
    """Devices of the program."""
    return math.prod(int(n) for n in _PARTITIONS.findall(module.header))


def sent_bytes(computation: Computation, instruction: Instruction, devices: int) -> float:
    """Bytes that each device sends, by the ring algorithms.

    Args:
      computation: it stands in.
      instruction: the collective, or its start.
      devices: of the whole program, for groups that name nobody.
    """
    opcode = instruction.opcode.removesuffix("-start")
    operands = [computation.instructions.get(name) for name in instruction.operands]
    taken = sum(full_bytes(operand.type) for operand in operands if operand)
    given = full_bytes(instruction.type)
    if instruction.opcode in ("all-gather-start", "collective-permute-start"):
        given -= taken  # its type is (operands, results, flags)
    if opcode == _PERMUTE:
        return taken
    group = group_size(instruction) or devices
    return _SENT[opcode] * max(taken, given) * (group - 1) / group
