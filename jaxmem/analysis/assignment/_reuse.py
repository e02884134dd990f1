"""Operands that die in an elementwise instruction, whose result takes their place."""

import itertools

from jaxmem.analysis._hlo import Computation, Instruction, Module
from jaxmem.analysis.assignment._flow import Flow
from jaxmem.analysis.assignment._heap import Block

_ELEMENTWISE = frozenset(
    """abs add and atan2 bitcast bitcast-convert cbrt ceil clamp clz compare complex convert copy cosine divide erf
    exponential exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply negate not
    or popcnt power real reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select shift-left
    shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan tanh xor""".split()
)
_COPIES = ("copy", "bitcast")  # alone they move nothing over itself


def reuse(flow: Flow, module: Module, instructions: dict[str, Instruction], blocks: dict[int, Block]) -> dict[int, int]:
    """Merges blocks where a result may take a dying operand's place; returns the block that each merged one is in."""
    positions = {name: position for position, name in enumerate(flow.schedule)}
    merged: dict[int, int] = {}

    def home(number: int) -> int:
        number = flow.buffer(number)
        while number in merged:
            number = merged[number]
        return number

    for name, operands in flow.operands.items():
        allowed = _elementwise_operands(module, instructions[name])
        if not allowed:
            continue
        for result in flow.held[name].values():
            for number in allowed:
                given = operands[number].get(()) if number < len(operands) else None
                if given is None:
                    continue
                one, other = home(given), home(result)
                if one != other and one in blocks and other in blocks:
                    spans = _joined(blocks[one], blocks[other], positions[name])
                    if spans is not None:
                        blocks[one].spans = spans
                        del blocks[other]
                        merged[other] = one
                        break
    return {buffer: home(buffer) for buffer in merged}


def _joined(one: Block, other: Block, position: int) -> list[tuple[int, int]] | None:
    """The spans of both, if they are of one size and meet only at `position`, where one ends and the other begins."""
    if one.size_bytes != other.size_bytes:
        return None
    spans = sorted(one.spans + other.spans)
    for (_, end), (start, _) in itertools.pairwise(spans):
        if start < end or (start == end and start != position):
            return None
    return spans


def _elementwise_operands(module: Module, instruction: Instruction) -> list[int]:
    """Numbers of the operands of which an instruction reads only the element that it writes."""
    if instruction.opcode in _ELEMENTWISE and instruction.opcode not in _COPIES:
        return list(range(len(instruction.operands)))
    called = module.computations.get(instruction.attribute("calls") or "") if instruction.opcode == "fusion" else None
    return _elementwise_parameters(called) if called else []


def _elementwise_parameters(called: Computation) -> list[int]:
    """Parameters that reach the root, or the elements of its tuple, through elementwise instructions only."""
    straight, other = set(), set()
    roots = [i for i in called.instructions.values() if i.is_root]
    straight.update(i.name for i in roots)
    for instruction in reversed(called.instructions.values()):
        name = instruction.name
        passes = instruction.opcode in _ELEMENTWISE or instruction.opcode == "tuple"
        for operand in instruction.operands if instruction.opcode not in ("parameter", "constant") else ():
            if name in straight and passes:
                straight.add(operand)
            if name in other or (name in straight and not passes):
                other.add(operand)
    return [
        int(i.literal)
        for i in called.instructions.values()
        if i.opcode == "parameter" and i.name in straight and i.name not in other
    ]
