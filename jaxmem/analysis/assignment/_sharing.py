"""Results that hold what an instruction was given: updates in place, what the compiler marks, starts and their ends."""

import re

from jaxmem.analysis.assignment._flow import Flow, Held, part, placed
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


def asynchronous(
    flow: Flow, module: Module, instruction: Instruction, operands: list[Held], inner: Held | None = None
) -> Held:
    """What a `-start`, `-update` or `-done` holds.

    Args:
      flow: to which it is added.
      module: that the instruction belongs to.
      instruction: for example "copy-start" or "all-gather-done".
      operands: what its operands hold.
      inner: what the root of the computation that it starts holds, if that is scheduled.

    XLA writes a start's result as ((operands...), results, contexts...), except that `copy-start` is
    (result, operand, context), `all-reduce-start` the result alone and `send` (operand, context, token).
    """
    position = flow.tick(instruction)
    flow.use_all(operands, position)
    name, _, step = instruction.opcode.rpartition("-")
    if step == "update":
        return operands[0]
    if step == "done":
        return _done(flow, instruction, name, operands[0], position)
    if name == "all-reduce":
        return flow.define(instruction, position)
    if name == "copy":
        return flow.define(instruction, position, placed(operands[0], 1))
    passed_on: Held = {}
    alone = "(" not in instruction.type[1:2]  # (operand, result, ...) rather than ((operands...), results, ...)
    for number, operand in enumerate(operands):
        passed_on |= placed(operand, 0) if alone else placed(operand, 0, number)
    for number in (inner or {}).values():
        flow.start[flow.value(number)] = position  # what it computes has no earlier moment
    held = flow.define(instruction, position, passed_on | placed(inner or {}, 1))
    # `fusion-start` is printed for a fusion in a computation of its own, which stays hidden.
    for index, operand, operand_index in in_place(module, instruction, name):
        given, result = operands[operand].get(operand_index), held.get((1, *index))
        if given is not None and result is not None:
            flow.share(result, given)
    return held


def _done(flow: Flow, instruction: Instruction, name: str, started: Held, position: int) -> Held:
    if name == "all-reduce":
        return started
    if name in ("send", "recv"):
        return flow.define(instruction, position, placed(part(started, 0), 0) if name == "recv" else None)
    return part(started, 0 if name == "copy" else 1)
