"""How often an HLO loop runs."""

import re

from jaxmem.analysis.hlo._parse import Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INTEGER = re.compile(r"[su](8|16|32|64)\[\]")
# What passes a scalar on unchanged.
_PASSING = ("copy", "bitcast", "convert")


def trip_count(module: Module, outer: Computation, loop: Instruction) -> int | None:
    """Trips of the `while` instruction `loop` in `outer`, or None where they depend on data.

    CPU and GPU compilers write the count next to the loop. On TPU it is worked out from a counter with a
    constant start, a constant step, and a comparison with a constant.
    """
    known = _KNOWN.search(loop.rest)
    if known:
        return int(known.group(1))
    condition = module.computations.get(loop.attribute("condition") or "")
    body = module.computations.get(loop.attribute("body") or "")
    if condition is None or body is None or condition.root is None or body.root is None:
        return None
    compared = _through_fusion(module, condition, condition.root, "compare")
    if compared is None or len(compared[1]) != 2:
        return None
    compare, (left, right) = compared
    direction = compare.attribute("direction")
    if direction in ("GT", "GE"):  # bound > counter
        left, right, direction = right, left, {"GT": "LT", "GE": "LE"}[direction]
    index, bound = _state_index(condition, left), _constant(condition, right)
    if index is None or bound is None or direction not in ("LT", "LE"):
        return None
    start = _constant(outer, _element(outer, outer.instructions.get(loop.operands[0]), index))
    step = _step(module, body, _element(body, body.root, index), index)
    if start is None or not step or step < 0:
        return None
    return max(0, -(-(bound + (direction == "LE") - start) // step))


def _through_fusion(
    module: Module, computation: Computation, instruction: Instruction, opcode: str
) -> tuple[Instruction, list[Instruction | None]] | None:
    """An `opcode` instruction, itself or as the root of a fusion, with its operands in `computation`'s terms."""
    arguments = [computation.instructions.get(name) for name in instruction.operands]
    if instruction.opcode == opcode:
        return instruction, arguments
    fused = module.computations.get(instruction.attribute("calls") or "") if instruction.opcode == "fusion" else None
    if fused is None or fused.root is None or fused.root.opcode != opcode:
        return None
    operands = [fused.instructions.get(name) for name in fused.root.operands]
    return fused.root, [arguments[int(o.literal)] if o and o.opcode == "parameter" else o for o in operands]


def _element(computation: Computation, value: Instruction | None, index: int) -> Instruction | None:
    if value is None or value.opcode != "tuple" or index >= len(value.operands):
        return None
    return computation.instructions.get(value.operands[index])


def _source(computation: Computation, value: Instruction | None) -> Instruction | None:
    while value is not None and value.opcode in _PASSING and value.operands:
        value = computation.instructions.get(value.operands[0])
    return value


def _constant(computation: Computation, value: Instruction | None) -> int | None:
    value = _source(computation, value)
    if value is None or value.opcode != "constant" or not _INTEGER.match(value.type):
        return None
    return int(value.literal)


def _state_index(computation: Computation, value: Instruction | None) -> int | None:
    """Which element of the loop's state an integer scalar is."""
    value = _source(computation, value)
    if value is None or value.opcode != "get-tuple-element" or not _INTEGER.match(value.type):
        return None
    index = value.attribute("index")
    return int(index) if index else None


def _step(module: Module, body: Computation, value: Instruction | None, index: int) -> int | None:
    """What one trip adds to element `index` of the state."""
    value = _source(body, value)
    added = _through_fusion(module, body, value, "add") if value else None
    if added is None or len(added[1]) != 2:
        return None
    left, right = added[1]
    if _state_index(body, left) != index:
        left, right = right, left
    return _constant(body, right) if _state_index(body, left) == index else None
