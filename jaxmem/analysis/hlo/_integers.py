"""Integer scalars of a compiled program, such as where a slice starts, worked out for one trip of a loop."""

import operator
import re
from typing import NamedTuple

from jaxmem.analysis.hlo._loops import trip_count
from jaxmem.analysis.hlo._parse import Computation, Instruction, Module

_INDUCTION = re.compile(r'"known_induction_variable":\{"tuple_index":"(\d+)"\}')
_STEPS = re.compile(r'"known_init_step":\{"init":"(-?\d+)","step":"(-?\d+)"\}')
UNCHANGED = ("copy", "bitcast", "reshape", "convert", "broadcast")
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


class Loop(NamedTuple):
    """A `while` whose counter the compiler names: element `counter` of its state is `init + step * trip`."""

    body: str
    counter: int
    init: int
    step: int
    trips: int


class Integers:
    """Values of integer scalars in the computations of a module."""

    def __init__(self, module: Module):
        self._module = module
        self._callers: dict[str, list[tuple[Computation, Instruction]]] = {}
        self._bodies: dict[str, tuple[Computation, Instruction]] = {}
        for computation in module.computations.values():
            for instruction in computation.instructions.values():
                if instruction.opcode == "while":
                    self._bodies[instruction.attribute("body") or ""] = computation, instruction
                elif not instruction.opcode.endswith(("-update", "-done")):
                    called = instruction.attribute("calls") or instruction.attribute("to_apply")
                    self._callers.setdefault(called or "", []).append((computation, instruction))

    def loop_round(self, computation: Computation, outer: int = 0) -> Loop | None:
        """The loop that a computation runs in, `outer` loops left out; None where its counter is not known."""
        name = computation.name
        while name not in self._bodies or outer:
            outer -= name in self._bodies
            above = self._bodies.get(name) or self._caller(name)
            if above is None:
                return None
            name = above[0].name
        where, loop = self._bodies[name]
        counter, steps, trips = _INDUCTION.search(loop.rest), _STEPS.search(loop.rest), None
        if counter and steps:
            trips = trip_count(self._module, where, loop)
        if counter is None or steps is None or trips is None:
            return None
        return Loop(name, int(counter.group(1)), int(steps.group(1)), int(steps.group(2)), trips)

    def value(self, computation: Computation, name: str, loop: Loop, trip: int) -> int | None:
        """What `name` is in a trip of the loop; None where it depends on anything else than constants and the trip."""
        found = computation.instructions.get(name)
        if found is None:
            return None
        if found.opcode == "constant":
            return _literal(found.literal)
        if found.opcode in ("parameter", "fusion", "call"):
            source = self.through(computation, found)
            return self.value(source[0], source[1].name, loop, trip) if source else None
        if found.opcode == "get-tuple-element":
            source = computation.instructions.get(found.operands[0])
            is_state = computation.name == loop.body and source is not None and source.opcode == "parameter"
            return loop.init + loop.step * trip if is_state and found.attribute("index") == str(loop.counter) else None
        if found.opcode in UNCHANGED:
            return self.value(computation, found.operands[0], loop, trip)
        apply = _ARITHMETIC.get(found.opcode) or _DIRECTIONS.get(found.attribute("direction") or "")
        given = [self.value(computation, operand, loop, trip) for operand in found.operands] if apply else []
        return int(apply(*given)) if apply and None not in given else None

    def through(self, computation: Computation, value: Instruction) -> tuple[Computation, Instruction] | None:
        """The value that a parameter is given by the one caller of its computation, or that a fusion returns."""
        if value.opcode == "parameter":
            caller = self._caller(computation.name)
            given = caller[0].instructions.get(caller[1].operands[int(value.literal)]) if caller else None
            return (caller[0], given) if caller and given else None
        inside = self._module.computations.get(value.attribute("calls") or value.attribute("to_apply") or "")
        return (inside, inside.root) if inside and inside.root else None

    def _caller(self, name: str) -> tuple[Computation, Instruction] | None:
        callers = self._callers.get(name, [])
        return callers[0] if len(callers) == 1 else None


def _literal(text: str) -> int | None:
    if text in ("true", "false"):
        return int(text == "true")
    return int(text) if re.fullmatch(r"-?\d+", text) else None
