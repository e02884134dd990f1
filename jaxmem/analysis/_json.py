"""Records as JSON values and back, and the JSON Schema of them: three walks over the types of their fields.

Reading is strict, so that a file of another sort or version is not half understood.
"""

import dataclasses
import functools
import inspect
import math
import types
import typing
from collections.abc import Collection
from typing import Any, TypeVar

from jaxmem._display import columns
from jaxmem.errors import InputError

Record = TypeVar("Record")

PAIRS = tuple[tuple[str, int], ...]
"""The type of (kind, bytes) pairs, which JSON has as an object."""

_PLAIN = {str: "string", int: "integer", float: "number", bool: "boolean"}
_LARGEST = 2**63
_DO = "Give what `jaxmem analyze FILE --json OUT`, or to_json() of a MemoryReport of this version, wrote."


class ReportReadError(InputError):
    """Something that is not the JSON of a `MemoryReport`, or that of another version of it."""


def values_of(record: Any) -> dict[str, Any]:
    """The fields of a record as JSON values: records and pairs as objects, tuples as lists."""
    hints = _hints(type(record))
    return {name: dict(value) if hints[name] == PAIRS else _value_of(value) for name, value in vars(record).items()}


def _value_of(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return values_of(value)
    return [_value_of(item) for item in value] if isinstance(value, tuple) else value


def read_record(cls: type[Record], values: Any, *, schema: str, computed: Collection[str] = ()) -> Record:
    """A record from what its `to_dict` made of it.

    Args:
      cls: a frozen dataclass; the types of its fields decide what is accepted.
      values: a dictionary of JSON values.
      schema: the name that `values["schema"]` must be.
      computed: keys that are worked out from the others, and are not read.

    Raises:
      ReportReadError: another schema, a key too many or too few, or a value of the wrong type.
    """
    if not isinstance(values, dict):
        raise _error(f"a report, an object with the schema {schema!r}", _said(values))
    if "schema" not in values and "rows" in values:
        raise _error(f"one report, an object with the schema {schema!r}", "a comparison of several, without buffers")
    if values.get("schema") != schema:
        raise _error(f"a report with the schema {schema!r}", f"the schema {_said(values.get('schema'))}")
    return _record(cls, {name: value for name, value in values.items() if name not in ("schema", *computed)}, "")


def _record(cls: type[Record], values: Any, where: str) -> Record:
    fields = {field.name: field for field in dataclasses.fields(cls)}  # pyright: ignore[reportArgumentType]
    if not isinstance(values, dict):
        raise _error(f"an object in {where}", _said(values))
    place = f" in {where}" if where else ""
    unknown = [name for name in values if name not in fields]
    if unknown:
        raise _error(f"only keys that a report of this version has{place}", f"{_said(unknown[0])}, which it has not")
    missing = [name for name, f in fields.items() if name not in values and f.default is dataclasses.MISSING]
    if missing:
        raise _error(f"the key {missing[0]!r}{place}", "an object without it")
    hints = _hints(cls)
    prefix = f"{where}." if where else ""
    return cls(**{name: _value(hints[name], value, prefix + name) for name, value in values.items()})


def _value(hint: Any, value: Any, where: str) -> Any:
    """`value` as the type `hint`: records of objects, tuples of lists."""
    if hint == PAIRS:
        if not isinstance(value, dict):
            raise _error(f"an object of kinds and bytes in {where}", _said(value))
        return tuple((_value(str, kind, where), _value(int, size, f"{where}.{kind}")) for kind, size in value.items())
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):  # only `X | None` occurs
        (inner,) = (part for part in typing.get_args(hint) if part is not types.NoneType)
        return None if value is None else _value(inner, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise _error(f"a list in {where}", _said(value))
        item = typing.get_args(hint)[0]
        return tuple(_value(item, each, f"{where}[{index}]") for index, each in enumerate(value))
    if origin is typing.Literal:
        if value not in typing.get_args(hint):
            raise _error(f"{where} to be one of {', '.join(map(repr, typing.get_args(hint)))}", _said(value))
        return value
    if dataclasses.is_dataclass(hint):
        return _record(typing.cast(type, hint), value, where)
    return _plain(hint, value, where)


def _plain(hint: type, value: Any, where: str) -> Any:
    if hint is float and type(value) in (int, float) and math.isfinite(value):
        return float(value)
    counts = hint is int and (where.endswith("_bytes") or "by_kind." in where)
    if hint is int and type(value) is int and abs(value) < _LARGEST and (value >= 0 or not counts):
        return value
    if hint is bool and isinstance(value, bool):
        return value
    if hint is str and isinstance(value, str) and _is_text(value):
        return value
    names = {int: "a whole number", float: "a finite number", bool: "true or false", str: "text"}
    least = ", not negative" if counts else ""
    raise _error(f"{names[hint]}{least} in {where}", _said(value))


def _is_text(value: str) -> bool:
    """Half of a surrogate pair is valid JSON, but cannot be printed."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


@functools.cache  # a report has thousands of buffers
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def _said(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}…"


def _error(wanted: str, got: str) -> ReportReadError:
    return ReportReadError(wanted=wanted, got=got, do=_DO)


def record_schema(
    cls: type, *, schema: str, optional: Collection[str], computed: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """The JSON Schema (2020-12) of a record.

    Args:
      cls: a frozen dataclass.
      schema: the name of it.
      optional: fields that may be left out.
      computed: the schemas of keys that are worked out from the fields.
    """
    definitions: dict[str, Any] = {}
    found = _object(cls, definitions)
    properties = {"schema": {"const": schema}, **found["properties"], **computed}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": schema,
        **found,
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "$defs": dict(sorted(definitions.items())),
    }


def _object(cls: type, definitions: dict[str, Any]) -> dict[str, Any]:
    """The schema of a record: all of its fields, and nothing else. A column says itself what it holds."""
    fields = dataclasses.fields(cls)
    told = {each.name: {"description": each.doc} for each in columns(cls)} if "column" in fields[0].metadata else {}
    text = inspect.getdoc(cls) or ""
    return {
        "type": "object",
        "description": text.partition("\n\nArgs:")[0] if told else text,
        "properties": {name: _of(hint, name, definitions) | told.get(name, {}) for name, hint in _hints(cls).items()},
        "required": [field.name for field in fields],
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
