"""Bytes that a collective sends over the interconnect, by the ring algorithms."""

from jaxmem.analysis.hlo._groups import group_size
from jaxmem.analysis.hlo._parse import COLLECTIVES, Computation, Instruction
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
