"""Reads XLA:CPU's own message about its buffers, which a compiled program carries: no dump is needed.

The message says where each value lies but not when; that comes from the scheduled HLO.
"""

import functools

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from jaxmem.analysis.assignment._follow import follow
from jaxmem.analysis.assignment._records import Allocation, AllocationKind, Assignment, Value
from jaxmem.analysis.hlo._module import Module
from jaxmem.analysis.hlo._types import leaves

_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {"int": _FIELD.TYPE_INT64, "bool": _FIELD.TYPE_BOOL, "str": _FIELD.TYPE_STRING, "enum": _FIELD.TYPE_INT32}
_PACKAGE = "jaxmem.xla"

# Messages of `xla/service/hlo.proto` with the fields that are needed; protobuf skips all others.
# Message → {field: (number, type)}; "*" marks a repeated field, a capital letter another message.
_SCHEMA = {
    "Location": {"shape_index": (3, "*int"), "instruction_id": (4, "int")},
    "LogicalBuffer": {"id": (1, "int"), "size": (2, "int"), "defined_at": (3, "Location"), "color": (4, "int")},
    "Assigned": {"logical_buffer_id": (1, "int"), "offset": (2, "int"), "size": (3, "int")},
    "Allocation": {
        "index": (1, "int"),
        "size": (2, "int"),
        "is_thread_local": (3, "bool"),
        "is_entry_computation_parameter": (5, "bool"),
        "parameter_number": (6, "int"),
        "maybe_live_out": (7, "bool"),
        "color": (8, "int"),
        "assigned": (9, "*Assigned"),
        "parameter_shape_index": (10, "*int"),
        "is_tuple": (11, "bool"),
        "is_constant": (12, "bool"),
    },
    "Event": {
        "kind": (1, "enum"),
        "buffer_id": (2, "int"),
        "computation_name": (3, "str"),
        "instruction_name": (4, "str"),
        "share_with_canonical_id": (5, "int"),
    },
    "Trace": {"events": (1, "*Event"), "whole_module_simulation": (2, "bool"), "buffer_allocation_index": (3, "int")},
    "BufferAssignment": {
        "logical_buffers": (1, "*LogicalBuffer"),
        "buffer_allocations": (3, "*Allocation"),
        "heap_simulator_traces": (4, "*Trace"),
    },
    "Instruction": {"name": (1, "str"), "opcode": (2, "str"), "id": (35, "int")},
    "Computation": {"name": (1, "str"), "instructions": (2, "*Instruction")},
    "Module": {"name": (1, "str"), "computations": (3, "*Computation")},
}


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
    ranges = flow.live_ranges()
    types = {(name, index): text for name, index, text in zip(flow.names, flow.indices, flow.types, strict=True)}
    try:
        message = _message("BufferAssignment").FromString(buffer_assignment)
        names = {
            instruction.id: instruction.name
            for computation in _message("Module").FromString(hlo_module).computations
            for instruction in computation.instructions
        }
    except Exception as error:  # protobuf's DecodeError has no stable public place
        raise ValueError(f"wanted XLA's serialized messages, got bytes that do not parse: {error}") from error
    buffers = {buffer.id: buffer for buffer in message.logical_buffers}

    def value(assigned, allocation: int) -> Value:
        buffer = buffers[assigned.logical_buffer_id]
        name, index = names.get(buffer.defined_at.instruction_id, ""), tuple(buffer.defined_at.shape_index)
        instruction = module.instruction(name)
        if instruction is None:
            raise ValueError(f"wanted the module of this buffer assignment, got one without instruction {name!r}")
        text = types.get((name, index)) or dict(leaves(instruction.type)).get(index, "")
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


@functools.cache
def _message(name: str) -> type:
    """The class of a message of `_SCHEMA`, in a pool of its own so that no other user of protobuf sees it."""
    file = descriptor_pb2.FileDescriptorProto(name="jaxmem_xla.proto", package=_PACKAGE, syntax="proto3")
    for message_name, fields in _SCHEMA.items():
        message = file.message_type.add(name=message_name)
        for field_name, (number, kind) in fields.items():
            field = message.field.add(name=field_name, number=number)
            field.label = _FIELD.LABEL_REPEATED if kind.startswith("*") else _FIELD.LABEL_OPTIONAL
            kind = kind.lstrip("*")
            field.type = _TYPES.get(kind, _FIELD.TYPE_MESSAGE)
            if kind not in _TYPES:
                field.type_name = f".{_PACKAGE}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))
