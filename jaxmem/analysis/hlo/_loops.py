"""Loops of a compiled program: how often they run, and what an integer scalar of theirs is in one trip."""

import operator
import re
from typing import NamedTuple

from jaxmem.analysis.hlo._module import Call, Computation, Instruction, Module

_KNOWN = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_INDUCTION = re.compile(r'"known_induction_variable":\{"tuple_index":"(\d+)"\}')
_STEPS = re.compile(r'"known_init_step":\{"init":"(-?\d+)","step":"(-?\d+)"\}')
_INTEGER = re.compile(r"[su](8|16|32|64)\[\]")
_CASTS = ("copy", "bitcast", "convert")
UNCHANGED = (*_CASTS, "reshape", "broadcast")
_DIRECTIONS = {d: getattr(operator, d.lower()) for d in ("EQ", "NE", "LT", "LE", "GT", "GE")}
_ARITHMETIC = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "negate": operator.neg,
    "and": operator.and_,
    "or": operator.or_,
    "not": lambda a: not a,
    "select": lambda which, yes, no: yes if which else no,
    "clamp": lambda low, value, high: min(max(value, low), high),
}


def trip_count(module: Module, outer: Computation, loop: Instruction) -> int | None:
    """Trips of the `while` instruction `loop` in `outer`, or None where they depend on data.

    CPU and GPU compilers write the count next to the loop. On TPU it is worked out from a counter with a
    constant start, a constant step, and a comparison with a constant.
    """
    known = _KNOWN.search(loop.rest)
    if known:
        return int(known.group(1))
    condition, body = module.callee(loop, "condition"), module.callee(loop, "body")
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
    start = _constant(outer, _element(outer, outer.operand(loop, 0), index))
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
    fused = module.callee(instruction) if instruction.opcode == "fusion" else None
    if fused is None or fused.root is None or fused.root.opcode != opcode:
        return None
    operands = [fused.instructions.get(name) for name in fused.root.operands]
    return fused.root, [arguments[int(o.literal)] if o and o.opcode == "parameter" else o for o in operands]


def _element(computation: Computation, value: Instruction | None, index: int) -> Instruction | None:
    return computation.operand(value, index) if value is not None and value.opcode == "tuple" else None


def _constant(computation: Computation, value: Instruction | None) -> int | None:
    value = computation.maker(value, _CASTS)
    if value is None or value.opcode != "constant" or not _INTEGER.match(value.type):
        return None
    return int(value.literal)


def _state_index(computation: Computation, value: Instruction | None) -> int | None:
    """Which element of the loop's state an integer scalar is."""
    value = computation.maker(value, _CASTS)
    if value is None or value.opcode != "get-tuple-element" or not _INTEGER.match(value.type):
        return None
    index = value.attribute("index")
    return int(index) if index else None


def _step(module: Module, body: Computation, value: Instruction | None, index: int) -> int | None:
    """What one trip adds to element `index` of the state."""
    value = body.maker(value, _CASTS)
    added = _through_fusion(module, body, value, "add") if value else None
    if added is None or len(added[1]) != 2:
        return None
    left, right = added[1]
    if _state_index(body, left) != index:
        left, right = right, left
    return _constant(body, right) if _state_index(body, left) == index else None


class Loop(NamedTuple):
    """A `while` whose counter the compiler names: element `counter` of its state is `init + step * trip`."""

    body: str
    counter: int
    init: int
    step: int
    trips: int


def loop_round(module: Module, computation: Computation, outer: int = 0) -> Loop | None:
    """The loop that a computation runs in, `outer` loops left out; None where its counter is not known."""
    while (call := _loop_of(module, computation)) is None or outer:
        outer -= call is not None
        call = call or _only_call(module, computation)
        if call is None:
            return None
        computation = call.outer
    counter, steps, trips = _INDUCTION.search(call.caller.rest), _STEPS.search(call.caller.rest), None
    if counter and steps:
        trips = trip_count(module, call.outer, call.caller)
    if counter is None or steps is None or trips is None:
        return None
    return Loop(computation.name, int(counter.group(1)), int(steps.group(1)), int(steps.group(2)), trips)


def integer(module: Module, computation: Computation, name: str, loop: Loop, trip: int) -> int | None:
    """What `name` is in a trip of the loop; None where it depends on anything else than constants and the trip."""
    found = computation.instructions.get(name)
    if found is None:
        return None
    if found.opcode == "constant":
        return _literal(found.literal)
    if found.opcode in ("parameter", "fusion", "call"):
        source = through(module, computation, found)
        return integer(module, source[0], source[1].name, loop, trip) if source else None
    if found.opcode == "get-tuple-element":
        source = computation.operand(found, 0)
        is_state = computation.name == loop.body and source is not None and source.opcode == "parameter"
        return loop.init + loop.step * trip if is_state and found.attribute("index") == str(loop.counter) else None
    if found.opcode in UNCHANGED:
        return integer(module, computation, found.operands[0], loop, trip)
    apply = _ARITHMETIC.get(found.opcode) or _DIRECTIONS.get(found.attribute("direction") or "")
    given = [integer(module, computation, operand, loop, trip) for operand in found.operands] if apply else []
    return int(apply(*given)) if apply and None not in given else None


def through(module: Module, computation: Computation, value: Instruction) -> tuple[Computation, Instruction] | None:
    """The value that a parameter is given by the one caller of its computation, or that a fusion returns."""
    if value.opcode == "parameter":
        call = _only_call(module, computation)
        given = call.outer.operand(call.caller, int(value.literal)) if call else None
        return (call.outer, given) if call and given else None
    inside = module.callee(value, "calls", "to_apply")
    return (inside, inside.root) if inside and inside.root else None


def _loop_of(module: Module, computation: Computation) -> Call | None:
    """The loop of which a computation is the body."""
    return next((call for call in module.call_sites.get(computation.name, ()) if call.role == "body"), None)


def _only_call(module: Module, computation: Computation) -> Call | None:
    """The fusion, call or the like that a computation belongs to; None where there are several."""
    calls = [
        call
        for call in module.call_sites.get(computation.name, ())
        if call.role in ("calls", "to_apply") and not call.caller.opcode.endswith(("-update", "-done"))
    ]
    return calls[0] if len(calls) == 1 else None


def _literal(text: str) -> int | None:
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None
