"""Follows values through the scheduled HLO: what each instruction defines, what it only passes on, who shares bytes.

The rules are those of XLA's dataflow analysis. Loops, conditionals, calls and asynchronous computations run at their
place in the schedule; computations inside fusions, reductions and the like hold no buffers.
"""

from jaxmem.analysis.assignment._flow import Flow, Held, part
from jaxmem.analysis.assignment._sharing import asynchronous, in_place
from jaxmem.analysis.hlo._module import Computation, Instruction, Module

_PASSES_ON = frozenset(("bitcast", "optimization-barrier", "domain", "add-dependency"))


def follow(module: Module) -> Flow:
    """The flow of a module whose computations stand in the order of the schedule.

    Raises:
      ValueError: the module has no entry.
    """
    if module.entry is None:
        raise ValueError("wanted HLO text with an ENTRY computation, got none")
    flow = Flow()
    outputs = _run(flow, module, module.computations[module.entry], None)
    flow.outputs = {index: flow.value(number) for index, number in outputs.items()}
    _bind_entry(flow, module)
    return flow


def _bind_entry(flow: Flow, module: Module) -> None:
    """Arguments live from the first position on, and to the last unless they are donated to an output."""
    length, donated = len(flow.schedule), set()
    for output, parameter, index in module.output_aliases:
        number = flow.parameters.get(parameter, {}).get(index)
        result = flow.outputs.get(output)
        if number is not None and result is not None:
            donated.add(number)
            flow.share(result, number)
    for held in flow.parameters.values():
        for number in held.values():
            flow.start[number] = 0
            if number not in donated:
                flow.end[number] = length


def _run(flow: Flow, module: Module, computation: Computation, arguments: list[Held] | None) -> Held:
    """Schedules a computation and the ones that it calls; returns what its root holds."""
    root: Held = {}
    for instruction in computation.instructions.values():
        held = _step(flow, module, instruction, arguments)
        flow.held[instruction.name] = held
        if instruction.is_root:
            root = held
    for number in root.values():
        flow.use(number, len(flow.schedule))
    return root


def _step(flow: Flow, module: Module, instruction: Instruction, arguments: list[Held] | None) -> Held:
    opcode = instruction.opcode
    if opcode == "parameter":
        number, position = int(instruction.literal), flow.tick(instruction)
        if arguments is None:
            flow.parameters[number] = flow.define(instruction, position)
            return flow.parameters[number]
        return arguments[number]
    operands = [_operand(flow, name) for name in instruction.operands]
    if opcode == "while":
        return _while(flow, module, instruction, operands[0])
    if opcode == "conditional":
        return _conditional(flow, module, instruction, operands)
    if opcode == "call":
        flow.use_all(operands, len(flow.schedule))
        result = _run(flow, module, module.computations[instruction.attribute("to_apply") or ""], operands)
        flow.tick(instruction)
        return result
    if opcode in ("async-start", "call-start"):
        called = module.callee(instruction)
        inner = _run(flow, module, called, operands) if called else None
        return asynchronous(flow, module, instruction, operands, inner)
    if opcode.endswith(("-start", "-done", "-update")) or opcode == "send":
        return asynchronous(flow, module, instruction, operands)
    position = flow.tick(instruction)
    if opcode == "get-tuple-element":
        number = int(instruction.attribute("index") or 0)
        if () in operands[0]:
            flow.use(operands[0][()], position)
        return part(operands[0], number)
    if opcode == "tuple":
        held = {(): flow.new(instruction.name, (), instruction.type, position)}
        for number, operand in enumerate(operands):
            held |= {(number, *index): value for index, value in operand.items()}
        return held
    flow.use_all(operands, position)
    if opcode in _PASSES_ON:
        return operands[0]
    held = flow.define(instruction, position)
    flow.operands[instruction.name] = operands
    for index, operand, operand_index in in_place(module, instruction):
        shared = operands[operand].get(operand_index) if operand < len(operands) else None
        if shared is not None and index in held:
            flow.share(held[index], shared)
    return held


def _operand(flow: Flow, name: str) -> Held:
    """What an operand holds; JAX 0.12 dumps `%loop#3` for an element of a tuple."""
    name, _, element = name.partition("#")
    held = flow.held.get(name, {})
    return part(held, int(element)) if element else held


def _while(flow: Flow, module: Module, instruction: Instruction, given: Held) -> Held:
    """A loop: an element that its body returns unchanged is one value; any other has one buffer for all trips."""
    condition = module.computations[instruction.attribute("condition") or ""]
    body = module.computations[instruction.attribute("body") or ""]
    tested = _copies(flow, condition, given)
    _run(flow, module, condition, [tested])
    for number in given.values():
        flow.use(number, len(flow.schedule))  # its place is the body's from here on
    carried = _copies(flow, body, given)
    returned = _run(flow, module, body, [carried])
    position = flow.tick(instruction)
    result: Held = {}
    for index, number in given.items():
        back = flow.value(returned.get(index, carried[index]))
        if back in (carried[index], flow.value(number)):
            flow.replace(carried[index], number)
            flow.replace(tested[index], number)
            result[index] = number
            continue
        result[index] = flow.new(instruction.name, index, flow.types[flow.value(number)], position)
        for other in (tested[index], carried[index], back, result[index]):
            flow.share(other, number)
    return result


def _copies(flow: Flow, computation: Computation, given: Held) -> Held:
    """New values for a computation's only parameter, in the shape of what it is given; they live from its start on."""
    parameter = next(i for i in computation.instructions.values() if i.opcode == "parameter")
    position = len(flow.schedule)
    return {
        index: flow.new(parameter.name, index, flow.types[flow.value(number)], position)
        for index, number in given.items()
    }


def _conditional(flow: Flow, module: Module, instruction: Instruction, operands: list[Held]) -> Held:
    roots = [
        _run(flow, module, module.computations[name], [operand])
        for name, operand in zip(instruction.branches, operands[1:], strict=True)
    ]
    position = flow.tick(instruction)
    flow.use_all(operands, position)
    result: Held = {}
    for index, type_ in ((i, flow.types[flow.value(n)]) for i, n in roots[0].items()):
        choices = {flow.value(root[index]) for root in roots}
        if len(choices) == 1:
            result[index] = choices.pop()
            continue
        result[index] = flow.new(instruction.name, index, type_, position)
        for number in choices:
            flow.share(number, result[index])
    return result
