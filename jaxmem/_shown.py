"""How objects show themselves: one line as `repr`, the terminal's table as `str`, and what a notebook displays."""

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

from jaxmem._display import in_words, renderers
from jaxmem._units import format_bytes

LONGEST = 199
"""Characters of a `repr`."""
_LONGEST_VALUE, _MOST_VALUES = 60, 8
_UNITS = ("_bytes", "flops", "_seconds")


class Brief:
    """A class whose `repr` is one line of less than 200 characters, and holds no value of an array.

    Where the fields, or those that differ from their defaults, are short and plain, the line is the Python code that
    makes an equal object. Otherwise it stands in angle brackets and says what there is room for: sizes in
    their units, shapes of arrays.

    >>> @dataclasses.dataclass(frozen=True, kw_only=True)
    ... class Sizes(Brief):
    ...     name: str
    ...     kept_bytes: int = 0
    ...     parts: tuple = ()
    >>> Sizes(name="a"), Sizes(name="a", kept_bytes=2048, parts=("x" * 300,) * 12)
    (Sizes(name='a', kept_bytes=0, parts=()), <Sizes name='a' kept=2.0 KiB parts=(12 values)>)
    """

    _identity = ()  # without a type: those who read the types of fields would take it for one

    def __init_subclass__(cls, identity: tuple[str, ...] = (), **options: Any):
        """`identity` names the attributes that tell one object from another; by default all fields."""
        super().__init_subclass__(**options)
        cls._identity = identity or cls._identity
        if "__repr__" not in vars(cls):
            cls.__repr__ = Brief.__repr__  # else a dataclass makes one of all its fields

    def __repr__(self) -> str:
        name = type(self).__name__
        told = [(field, getattr(self, field)) for field in self._identity]
        if not self._identity:
            told = differing(self)
            every = [(field.name, getattr(self, field.name)) for field in dataclasses.fields(self)]  # pyright: ignore[reportArgumentType]
            for fields in (every, told):
                written = [(field, _written(value)) for field, value in fields]
                code = f"{name}({', '.join(f'{field}={text}' for field, text in written)})"
                if all(text for _, text in written) and len(code) <= LONGEST:
                    return code
        return one_line(name, [(_without_unit(field), brief(value, field)) for field, value in told])


class Shown(Brief):
    """A record that people look at: `print` gives the terminal's table, a notebook displays it, and it can be saved."""

    def __str__(self) -> str:
        """What a terminal shows, without colours; as wide as the terminal, or 100 columns where there is none."""
        return renderers().text(self)

    def show(self) -> None:
        """Displays it: in a notebook as HTML, elsewhere as the terminal's table, with colours."""
        renderers().show(self)

    def save(self, path: str | os.PathLike) -> None:
        """Writes it to a file, in the format of the file's ending: `.html`, `.json` or `.csv`.

        Raises:
          InputError: another ending, or a format that this record has not.
        """
        renderers().save(self, path)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return renderers().report_fragment(self)


class JsonRecord(Shown):
    """A `Shown` that is also JSON."""

    def to_dict(self) -> dict[str, Any]:
        """What it holds, as JSON-ready values."""
        raise NotImplementedError

    def to_json(self) -> str:
        """`to_dict` as indented JSON."""
        return json.dumps(self.to_dict(), indent=2)


def one_line(name: str, parts: list[tuple[str, str]]) -> str:
    """`<name part=text …>`, with as many parts as fit.

    >>> one_line("Thing", [("size", "2.0 KiB"), ("", "of a kind")])
    '<Thing size=2.0 KiB of a kind>'
    """
    line = f"<{name}"
    for field, text in parts:
        word = " " + (f"{field}={text}" if field else text).replace("\n", " ")
        if len(line) + len(word) + len(" …>") > LONGEST:
            return f"{line} …>"
        line += word
    return f"{line}>"


def brief(value, name: str = "") -> str:
    """A value in a few words; of arrays their shapes or their bytes, so that no device is waited for.

    >>> brief(2048, "peak_bytes"), brief(1 / 3), brief(brief), brief(("a", "b")), brief({"a": [1] * 9})
    ('2.0 KiB', '0.333', 'brief', "('a', 'b')", '(1 value)')
    """
    if is_array(value) and not isinstance(value, float):  # NumPy's float64 is both
        return array_type(value)
    if isinstance(value, float) or (name.endswith(_UNITS) and type(value) is int):
        return in_words(name, float(value) if isinstance(value, float) else value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    text = _written(value)
    if text is not None and len(text) <= _LONGEST_VALUE:
        return text
    if isinstance(value, str):
        return repr(value[: _LONGEST_VALUE - 3] + "…")
    if hasattr(value, "__qualname__"):
        return name_of(value)
    if type(value).__module__.partition(".")[0] == "numpy":  # a dtype
        return str(value)
    return _of_arrays(value) or _count(value) or f"<{type(value).__name__}>"


def name_of(fn: Any) -> str:
    """The name of a function or class, without that of the function in which it was made."""
    name = getattr(fn, "__qualname__", type(fn).__name__)
    return name.rpartition("<locals>.")[2][-_LONGEST_VALUE:]


def is_array(value) -> bool:
    """Whether it has the shape, dtype and size of an array, which may be a tracer or only a shape."""
    return all(hasattr(value, name) for name in ("shape", "dtype", "size")) and not isinstance(value, type)


def array_type(value) -> str:
    """`float32[8,4]`."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def arrays_in_words(tree: Any) -> str:
    """How many arrays a pytree has, how many numbers these hold, and their bytes; by their shapes.

    >>> import numpy as np
    >>> arrays_in_words({"w": np.ones((4, 4), "float32"), "b": np.ones(4, "float32")})
    '2 arrays of 20 numbers, 80 B'
    """
    import jax

    leaves = [leaf for leaf in jax.tree.leaves(tree) if is_array(leaf)]
    count = sum(leaf.size for leaf in leaves)
    sizes = sum(leaf.size * getattr(leaf.dtype, "itemsize", 0) for leaf in leaves)
    many = f"{len(leaves):,} array{'s' if len(leaves) != 1 else ''}"
    return f"{many} of {count:,} number{'s' if count != 1 else ''}, {format_bytes(sizes)}"


def differing(record: Any) -> list[tuple[str, Any]]:
    """(field, value) of those that are not at their default."""
    told = []
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        plain = _written(value) is not None and not is_array(default)
        if value is not default and not (plain and type(value) is type(default) and value == default):
            told.append((field.name, value))
    return told


def _written(value: Any) -> str | None:
    """A value as Python code; None where that is long, or its `repr` may be none, as that of an array."""
    if isinstance(value, float):
        return repr(float(value))
    if value is None or isinstance(value, bool | int | complex):
        return repr(value)
    if isinstance(value, str):
        return repr(value) if len(value) <= LONGEST else None
    if isinstance(value, Brief):
        text = repr(value)
        return None if text.startswith("<") else text
    if type(value) in (tuple, list) and len(value) <= _MOST_VALUES:
        texts = [_written(each) for each in value]
        return _joined(value, texts) if all(texts) else None
    return None


def _joined(value: Any, texts: list) -> str:
    inside = ", ".join(texts)
    return f"[{inside}]" if isinstance(value, list) else f"({inside},)" if len(texts) == 1 else f"({inside})"


def _of_arrays(value: Any) -> str:
    if not isinstance(value, tuple | list | Mapping) and not dataclasses.is_dataclass(value):
        return ""
    import jax

    leaves = jax.tree.leaves(value)
    return arrays_in_words(value) if leaves and all(is_array(leaf) for leaf in leaves) else ""


def _count(value: Any) -> str:
    if isinstance(value, tuple | list | Mapping | set | frozenset):
        return f"({len(value)} value{'s' if len(value) != 1 else ''})"
    return ""


def _without_unit(name: str) -> str:
    return name.removesuffix("_bytes").removesuffix("_seconds")
