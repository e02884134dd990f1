"""An HLO module as a graph: who calls a computation, what uses a value, what a value stands for."""

import functools
from typing import NamedTuple

from jaxmem.analysis.hlo._parse import Computation, Instruction, Module, computation_names

# Attributes that name called computations, in the order of the operands' use.
_CALLS = ("calls", "to_apply", "body", "condition", "branch_computations", "true_computation", "false_computation")


class Call(NamedTuple):
    """A computation's place in the module: the instruction that calls it, and how."""

    caller: Instruction
    role: str
    outer: Computation


class Graph:
    """Look-ups over a module; each table is made when first asked for."""

    def __init__(self, module: Module):
        self.module = module

    @functools.cached_property
    def computation_of(self) -> dict[str, Computation]:
        """Instruction name → the computation it stands in; names are unique in a module."""
        return {name: c for c in self.module.computations.values() for name in c.instructions}

    @functools.cached_property
    def calls(self) -> dict[str, Call]:
        """Computation name → its first call."""
        found: dict[str, Call] = {}
        for outer in self.module.computations.values():
            for instruction in outer.instructions.values():
                for role, callee in called(instruction):
                    found.setdefault(callee, Call(instruction, role, outer))
        return found

    @functools.cached_property
    def _users(self) -> dict[str, dict[str, list[tuple[Instruction, int]]]]:
        return {}

    def users(self, name: str) -> list[tuple[Instruction, int]]:
        """(user, operand number) of an instruction, within its computation; one computation at a time is looked at."""
        computation = self.computation_of.get(name)
        if computation is None:
            return []
        if computation.name not in self._users:
            found: dict[str, list[tuple[Instruction, int]]] = {}
            for instruction in computation.instructions.values():
                for number, operand in enumerate(self.operands(instruction)):
                    found.setdefault(operand, []).append((instruction, number))
            self._users[computation.name] = found
        return self._users[computation.name].get(name, [])

    @functools.cached_property
    def _operands(self) -> dict[str, list[str]]:
        return {}

    def operands(self, instruction: Instruction) -> list[str]:
        """Names of an instruction's operands, looked for once."""
        found = self._operands.get(instruction.name)
        if found is None:
            found = self._operands[instruction.name] = instruction.operands
        return found

    def instruction(self, name: str) -> Instruction | None:
        """The instruction of that name, wherever it stands."""
        computation = self.computation_of.get(name)
        return computation.instructions.get(name) if computation else None

    def operand(self, instruction: Instruction, number: int) -> Instruction | None:
        """Operand `number` of an instruction."""
        operands = self.operands(instruction)
        return self.instruction(operands[number]) if number < len(operands) else None

    def callee(self, instruction: Instruction, role: str) -> Computation | None:
        """The computation that an instruction calls in `role`."""
        name = next((callee for r, callee in called(instruction) if r == role), None)
        return self.module.computations.get(name) if name else None


def called(instruction: Instruction) -> list[tuple[str, str]]:
    """(role, computation name) of what an instruction calls."""
    rest = instruction.rest  # of most instructions, which call nothing: hence no loop
    if "calls=" not in rest and "to_apply=" not in rest and "body=" not in rest and "computation" not in rest:
        return []
    found = []
    for role in _CALLS:
        value = instruction.attribute(role)
        if value:
            found += [(role, name) for name in computation_names(value)]
    return found
