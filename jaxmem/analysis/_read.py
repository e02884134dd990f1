"""Records back from their JSON values: strict, so that a file of another sort or version is not half understood."""

import dataclasses
import functools
import math
import types
import typing
from typing import Any, TypeVar

from jaxmem.errors import InputError

Record = TypeVar("Record")

PAIRS = tuple[tuple[str, int], ...]
"""The type of (kind, bytes) pairs, which JSON has as an object."""

_LARGEST = 2**63
_DO = "Give what `jaxmem analyze FILE --json OUT`, or to_json() of a MemoryReport of this version, wrote."


class ReportReadError(InputError):
    """Something that is not the JSON of a `MemoryReport`, or that of another version of it."""


def read_record(cls: type[Record], values: Any, *, schema: str, computed: tuple[str, ...] = ()) -> Record:
    """A record from what its `to_dict` made of it.

    Args:
      cls: a frozen dataclass; the types of its fields decide what is accepted.
      values: a dictionary of JSON values.
      schema: the name that `values["schema"]` must be.
      computed: keys that are worked out from the others, and left aside here.

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
    missing = [
        name
        for name, field in fields.items()
        if name not in values and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
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
    """Half of a surrogate pair is valid JSON, but nothing can print it."""
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
