"""Bytes that a collective sends over the interconnect, by the ring algorithms."""

import math
import re

from jaxmem.analysis.hlo._parse import COLLECTIVES, Computation, Instruction, Module
from jaxmem.analysis.step_time._bytes import full_bytes

# What a ring of n devices sends, in shares of (n - 1) / n of the larger of input and output.
_SENT = {
    "all-reduce": 2.0,
    "all-gather": 1.0,
    "reduce-scatter": 1.0,
    "all-to-all": 1.0,
    "ragged-all-to-all": 1.0,
    "collective-broadcast": 1.0,
}
_PERMUTE = "collective-permute"
_LISTED = re.compile(r"replica_groups=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=")
_PARTITIONS = re.compile(r"(?:num_partitions|replica_count)=(\d+)")


def is_collective(opcode: str) -> bool:
    """Whether it talks to other devices.

    >>> is_collective("all-reduce-start"), is_collective("reduce")
    (True, False)
    """
    return opcode.removesuffix("-start") in COLLECTIVES


def sent_bytes(computation: Computation, instruction: Instruction, devices: int) -> float:
    """Bytes that each device sends.

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


def group_size(instruction: Instruction) -> int | None:
    """Devices that take part in one group; None where the text names none.

    >>> group_size(Instruction("a", "f32[]", "all-reduce", "%x), replica_groups=[2,4]<=[8]", False))
    4
    """
    listed = _LISTED.search(instruction.rest)
    if listed:
        return len(listed.group(1).split(","))
    iota = _IOTA.search(instruction.rest)
    return int(iota.group(1).split(",")[-1]) if iota else None


def device_count(module: Module) -> int:
    """Devices of the program."""
    return math.prod(int(n) for n in _PARTITIONS.findall(module.header))
