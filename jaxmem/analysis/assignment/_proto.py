"""Reads XLA:CPU's own message about its buffers, which a compiled program carries: no dump is needed.

The message says where each value lies but not when; that comes from the scheduled HLO.
"""

from jaxmem.analysis.assignment._follow import follow
from jaxmem.analysis.assignment._messages import message_class
from jaxmem.analysis.assignment._ranges import live_ranges
from jaxmem.analysis.assignment._records import Allocation, AllocationKind, Assignment, Value
from jaxmem.analysis.hlo._module import Module
from jaxmem.analysis.hlo._types import leaves


def read_proto(buffer_assignment: bytes, hlo_module: bytes, module: Module) -> Assignment:
    """The assignment in a serialized `BufferAssignmentProto`.

    Args:
      buffer_assignment: `compiled.memory_analysis().serialized_buffer_assignment_proto`, filled on CPU only.
      hlo_module: the serialized `HloModuleProto` of the same program, which names what the message numbers.
      module: `parse_hlo(compiled.as_text())`.

    Raises:
      ValueError: the bytes are no such message, or name instructions that the module does not have.
    """
    flow = follow(module)
    ranges = live_ranges(flow)
    types = {(name, index): text for name, index, text in zip(flow.names, flow.indices, flow.types, strict=True)}
    instructions = {i.name: i for c in module.computations.values() for i in c.instructions.values()}
    try:
        message = message_class("BufferAssignment").FromString(buffer_assignment)
        names = {
            instruction.id: instruction.name
            for computation in message_class("Module").FromString(hlo_module).computations
            for instruction in computation.instructions
        }
    except Exception as error:  # protobuf's DecodeError has no stable public place
        raise ValueError(f"wanted XLA's serialized messages, got bytes that do not parse: {error}") from error
    buffers = {buffer.id: buffer for buffer in message.logical_buffers}

    def value(assigned, allocation: int) -> Value:
        buffer = buffers[assigned.logical_buffer_id]
        name, index = names.get(buffer.defined_at.instruction_id, ""), tuple(buffer.defined_at.shape_index)
        if name not in instructions:
            raise ValueError(f"wanted the module of this buffer assignment, got one without instruction {name!r}")
        text = types.get((name, index)) or dict(leaves(instructions[name].type)).get(index, "")
        start, end = ranges.get((name, index), (-1, -1))
        return Value(name, index, assigned.size, allocation, assigned.offset, text, buffer.color, start, end)

    allocations = []
    for a in message.buffer_allocations:
        values = sorted((value(assigned, a.index) for assigned in a.assigned), key=lambda v: (v.start, v.name, v.index))
        is_parameter = a.is_entry_computation_parameter
        allocation = Allocation(
            number=a.index,
            size_bytes=a.size,
            kind=_kind(a),
            parameter=a.parameter_number if is_parameter else None,
            shape_index=tuple(a.parameter_shape_index),
            live_out=a.maybe_live_out,
            color=a.color,
            values=tuple(values),
        )
        allocations.append(allocation)
    return Assignment(allocations=tuple(allocations), schedule=tuple(flow.schedule), source="proto", platform="cpu")


def _kind(allocation) -> AllocationKind:
    if allocation.is_thread_local:
        return "thread_local"
    if allocation.is_entry_computation_parameter:
        return "parameter"
    if allocation.is_constant:
        return "constant"
    return "output" if allocation.maybe_live_out else "temp"
