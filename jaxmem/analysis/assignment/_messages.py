"""The few protobuf messages of XLA that are read here, with only the fields that are needed.

Field numbers are those of `xla/service/hlo.proto`; protobuf skips every field that is not named here.
"""

import functools

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_FIELD = descriptor_pb2.FieldDescriptorProto
_TYPES = {"int": _FIELD.TYPE_INT64, "bool": _FIELD.TYPE_BOOL, "str": _FIELD.TYPE_STRING, "enum": _FIELD.TYPE_INT32}
_PACKAGE = "jaxmem.xla"

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


@functools.cache
def message_class(name: str) -> type:
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
