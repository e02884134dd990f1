"""The JSON Schema of a report, from the types of the records themselves."""

import dataclasses
import inspect
import types
import typing
from typing import Any

from jaxmem.analysis._read import PAIRS
from jaxmem.analysis._report import DETAILS, SCHEMA, MemoryReport

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}


def report_schema() -> dict[str, Any]:
    """The JSON Schema (2020-12) of `MemoryReport.to_dict()`, of all its details or without them.

    >>> schema = report_schema()
    >>> schema["properties"]["peak_bytes"]
    {'anyOf': [{'type': 'integer', 'minimum': 0}, {'type': 'null'}]}
    >>> sorted(schema["$defs"])[:3]
    ['Buffer', 'DonationMiss', 'DtypeBytes']
    """
    definitions: dict[str, Any] = {}
    report = _object(MemoryReport, definitions)
    origins = {"type": "object", "additionalProperties": {"type": "string"}}
    properties = {"schema": {"const": SCHEMA}, **report["properties"], "provenances": origins}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": SCHEMA,
        **report,
        "properties": properties,
        "required": [name for name in properties if name not in DETAILS],
        "$defs": dict(sorted(definitions.items())),
    }


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a record: all of its fields, and nothing else."""
    properties = {name: _of(hint, name, definitions) for name, hint in typing.get_type_hints(cls).items()}
    return {
        "type": "object",
        "description": inspect.getdoc(cls) or "",
        "properties": properties,
        "required": [field.name for field in dataclasses.fields(cls)],
        "additionalProperties": False,
    }


def _of(hint: Any, name: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a value of type `hint` in the field `name`; records go to `definitions`."""
    if hint == PAIRS:
        return {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}}
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return {"anyOf": [_of(part, name, definitions) for part in arguments]}
    if origin is tuple:
        return {"type": "array", "items": _of(arguments[0], name, definitions)}
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if hint is types.NoneType:
        return {"type": "null"}
    if dataclasses.is_dataclass(hint):
        record = typing.cast(type, hint)
        if record.__name__ not in definitions:
            definitions[record.__name__] = {}  # its place is taken before its fields are looked at
            definitions[record.__name__] = _object(record, definitions)
        return {"$ref": f"#/$defs/{record.__name__}"}
    least = {"minimum": 0} if hint is int and name.endswith("_bytes") else {}
    return {"type": _PLAIN[hint], **least}
