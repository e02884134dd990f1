"""Which results must be the same bytes as an operand: updates in place, and what the compiler marks so."""

import re

from jaxmem.analysis.hlo._module import Index, Instruction, Module, parse_aliases

_MARKED = re.compile(r"output_to_operand_aliasing=\{(.*?\))\}")
_UPDATES = ("dynamic-update-slice", "scatter")


def in_place(module: Module, instruction: Instruction, opcode: str = "") -> list[tuple[Index, int, Index]]:
    """(index of the result, number of the operand, index in it) of those that share their bytes.

    `opcode` is what a start begins; by default the instruction's own.
    """
    opcode = opcode or instruction.opcode
    marked = _MARKED.search(instruction.rest)
    if marked:
        return parse_aliases(marked.group(1))
    if opcode in _UPDATES:
        return [((), 0, ())]
    if opcode != "fusion":
        return []
    called = module.callee(instruction)
    root = called.root if called else None
    if called is None or root is None:
        return []
    if root.opcode != "tuple":
        number = _updated_parameter(called.instructions, root)
        return [] if number is None else [((), number, ())]
    elements = [called.instructions.get(name) for name in root.operands]
    numbers = [_updated_parameter(called.instructions, element) if element else None for element in elements]
    return [((index,), number, ()) for index, number in enumerate(numbers) if number is not None]


def _updated_parameter(instructions: dict[str, Instruction], instruction: Instruction | None) -> int | None:
    """The number of the parameter that an element of the root updates in place, if it does."""
    updates = False
    while instruction is not None:
        if instruction.opcode == "parameter":
            return int(instruction.literal) if updates else None
        if instruction.opcode in _UPDATES:
            updates = True
        elif instruction.opcode != "bitcast":
            return None
        operands = instruction.operands
        instruction = instructions.get(operands[0]) if operands else None
    return None
