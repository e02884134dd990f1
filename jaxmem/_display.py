"""How records show themselves: the column that each field is, and the renderers that draw them."""

import dataclasses
import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from jaxmem._units import format_bytes, format_flops, format_seconds

Record = TypeVar("Record")

VIEWS = ("terminal", "page", "row", "page_row", "diff", "buffer_row", "detail")
"""Where a field may have a heading: the list of one report's numbers in a terminal and in the page; the table of a
comparison, a row a variant, in both; the totals of a diff; the page's table of buffers, and what it tells of one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Column:
    """A field of a record: all that renderers, schema and help say of it.

    Args:
      name: of the field. It ends in `_bytes`, `flops` or `_seconds` where the value has that unit.
      doc: what the field holds, in a sentence or two.
      provenance: "compiled", "modelled" or "measured"; or the field that tells which; empty for what is no number.
      headings: view → heading. A view without one leaves the column out.
      note: what the page says beside the value; a function of the record where it depends on that.
      words: the value in words, from the record; by default `in_words` of it.
      after: the field that this one follows in a list; by default the one declared before it.
      rank: in a table, which may be too wide, columns of low rank come first.
      where: in a table, the field in which rows must differ for this column to be shown; empty for one that always is.
    """

    name: str = ""
    doc: str
    provenance: str
    headings: Mapping[str, str]
    note: str | Callable[[Any], str] = ""
    words: Callable[[Any], str] | None = None
    after: str = ""
    rank: int = 99
    where: str = ""

    def text(self, record: Any) -> str:
        """The value in words; a dash where it is unknown."""
        return self.words(record) if self.words else in_words(self.name, getattr(record, self.name))

    def provenance_in(self, record: Any) -> str:
        """Where the value is from: "compiled", "modelled" or "measured"."""
        return getattr(record, self.provenance, self.provenance)


def column(doc: str, provenance: str = "", *, default: Any = dataclasses.MISSING, **told: Any) -> Any:
    """A field of a `record`, with what a `Column` says of it and, by view, its headings."""
    headings = {view: told.pop(view) for view in VIEWS if view in told}
    compare = provenance != "measured"  # two reports of one program are equal, however long each took
    made = Column(doc=doc, provenance=provenance, headings=headings, **told)
    return dataclasses.field(default=default, compare=compare, metadata={"column": made})


@typing.dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(column,))
def record(cls: type[Record]) -> type[Record]:
    """A frozen, keyword-only dataclass whose docstring lists its columns.

    >>> @record
    ... class Sizes:
    ...     '''Sizes of a program.'''
    ...     sent_bytes: int = column("Bytes sent.", "modelled", terminal="sent")
    >>> print(inspect.getdoc(Sizes))
    Sizes of a program.
    <BLANKLINE>
    Args:
      sent_bytes: Bytes sent.
    >>> [(c.headings["terminal"], c.text(Sizes(sent_bytes=2048))) for c in columns(Sizes, "terminal")]
    [('sent', '2.0 KiB')]
    """
    made = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    told = [f"  {each.name}: {each.doc}" for each in columns(made)]
    made.__doc__ = "\n".join([inspect.cleandoc(made.__doc__ or ""), "", "Args:", *told])
    return made


@functools.cache
def columns(cls: type, view: str = "") -> tuple[Column, ...]:
    """The columns of a record, as declared; those of one view in the order in which it shows them."""
    fields = dataclasses.fields(cls)  # pyright: ignore[reportArgumentType]
    found = [dataclasses.replace(field.metadata["column"], name=field.name) for field in fields]
    if not view:
        return tuple(found)
    for each in [each for each in found if each.after]:
        found.remove(each)
        found.insert([other.name for other in found].index(each.after) + 1, each)
    if view.endswith("row"):
        found.sort(key=lambda each: each.rank)
    return tuple(each for each in found if view in each.headings)


def table_columns(rows: Sequence[Any], view: str) -> tuple[Column, ...]:
    """The columns of a table of records, without those that say the same of all of them and need not."""

    def shown(each: Column) -> bool:
        return not each.where or len({getattr(row, each.where) for row in rows}) > 1

    return tuple(filter(shown, columns(type(rows[0]), view)))


def in_words(name: str, value: Any) -> str:
    """A value in the unit that the name of its field ends in; a dash where it is unknown.

    >>> in_words("peak_bytes", 2048), in_words("flops", None), in_words("share", 0.12345)
    ('2.0 KiB', '-', '0.123')
    """
    for unit, form in (("_bytes", format_bytes), ("flops", format_flops), ("_seconds", format_seconds)):
        if name.endswith(unit):
            return form(value)
    return "-" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)


_load: Callable[[], Any] | None = None


def draw_with(load: Callable[[], Any]) -> None:
    """Sets what loads the renderers: they stand above the records, so the top of the package names them."""
    global _load
    _load = load


def renderers() -> Any:
    """The module of renderers, `jaxmem.report.shown`, loaded when a record is first shown."""
    assert _load is not None, "importing any part of jaxmem imports its top, which says what draws"
    return _load()
