"""What a forward pass keeps, and what a budget keeps of it, as rich renderables: tables of the largest values."""

import os
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Group
from rich.text import Text

from jaxmem._shown import array_type
from jaxmem._source import short_place
from jaxmem._units import format_bytes
from jaxmem.remat import Residual, ResidualTable, Solution
from jaxmem.report.differences import family
from jaxmem.report.terminal import table

_SMALL = 1 / 500  # kinds of values below this share of the total are one line
_MOST = 16  # lines of a solution
_WHAT = ("value", "op or name", "module", "source")
_FATES = {"keep": "kept", "offload": "offloaded", "recompute": "recomputed"}

Key = tuple[str, ...]


class _Alike:
    """Values that differ only in the number of their module."""

    def __init__(self):
        self.size, self.count, self.modules = 0, 0, []

    def add(self, size: int, count: int, module: str) -> None:
        self.size += size
        self.count += count
        self.modules.append(module)


def render_residuals(residuals: ResidualTable) -> Group:
    """A line for each kind of value, with those before the policy beside them; then the totals.

    Where a target stores other bytes than the values have, there are columns of both.
    """
    tables = [residuals] if residuals.before is None else [residuals.before, residuals]
    heads = ["bytes"] if residuals.before is None else ["before", "after"]
    columns = [_alike((row, (), row.count) for row in each.rows) for each in tables]
    totals = [each.total_bytes for each in tables]
    if any(row.stored_bytes is not None for each in tables for row in each.rows):
        held = [_alike(((row, (), row.count) for row in each.rows), lambda row: row.held_bytes) for each in tables]
        columns, heads = [*held, *columns], [f"{'stored ' * stored}{head}" for stored in (1, 0) for head in heads]
        totals = [sum(row.held_bytes for row in each.rows) for each in tables] + totals
    sizes = {key: [column[key].size if key in column else 0 for column in columns] for c in columns for key in c}
    keys = sorted(sizes, key=lambda key: (-max(sizes[key]), key))
    largest = max(totals)
    shown = [key for key in keys if max(sizes[key]) >= _SMALL * largest]
    made = table((*heads, "count", *_WHAT), right=(*heads, "count"))
    for key in shown:
        groups = [column[key] for column in columns if key in column]
        modules = [module for group in groups for module in group.modules]
        cells = [format_bytes(size) if size else "-" for size in sizes[key]]
        made.add_row(*cells, str(max(group.count for group in groups)), *_what(key, modules))
    if rest := keys[len(shown) :]:  # they are sorted by size
        sums = [format_bytes(sum(column)) for column in zip(*(sizes[key] for key in rest), strict=True)]
        made.add_row(*sums, "", f"{len(rest)} smaller kinds")
    made.add_row(*map(format_bytes, totals), "", "total", style="bold")
    if residuals.host_bytes:
        made.add_row(*[""] * (len(heads) - 1), format_bytes(residuals.host_bytes), "", "of which on the host")
    return Group(made)


def render_solution(solution: Solution) -> Group:
    """The largest values that are kept and recomputed, those alike as one line; and a sentence of totals."""
    inside = _alike((value, (value.fate,), value.layers) for value in solution.values)
    outside = _alike(((row, ("outside",), row.count) for row in solution.outside), lambda row: row.held_bytes)
    found = sorted({**inside, **outside}.items(), key=lambda item: -item[1].size)
    order = [*_FATES, "outside"]
    shown = sorted(found[:_MOST], key=lambda item: (order.index(item[0][0]), -item[1].size))
    made = table(("bytes", "fate", "layers", *_WHAT), right=("bytes", "layers"))
    for (fate, *key), group in shown:
        layers = "-" if fate == "outside" else str(group.count)
        told = _FATES.get(fate, "kept outside")
        made.add_row(format_bytes(group.size), told, layers, *_what(tuple(key), group.modules))
    rest = found[_MOST:]
    more = [Text(f"and {len(rest)} smaller, {_size(rest)} in total", style="dim")] if rest else []
    return Group(made, *more, Text(f"\n{solution.summary}"))


def _alike(
    rows: Iterable[tuple[Any, Key, int]], size: Callable[[Any], int] = lambda row: row.size_bytes
) -> dict[Key, _Alike]:
    groups: dict[Key, _Alike] = {}
    for row, first, count in rows:
        host = " host" if isinstance(row, Residual) and row.memory == "host" else ""
        shape = f"{array_type(row)}{host}"
        key = (*first, shape, row.name or "", row.op, short_place(row.source))
        groups.setdefault(key, _Alike()).add(size(row), count, row.module)
    return groups


def _what(key: Key, modules: list[str]) -> list[Text]:
    shape, name, op, source = key
    what = f"{name} ({op})" if name else op
    return [Text(cell) for cell in (shape, what, common(modules) or "-", source or "-")]


def _size(groups: list[tuple[Key, _Alike]]) -> str:
    return format_bytes(sum(group.size for _, group in groups))


def common(modules: list[str]) -> str:
    """One module path for several: numbers that differ become a star, and what differs otherwise is cut off.

    >>> common(["GPT/block_0/mlp", "GPT/block_1/mlp"]), common(["GPT/a", "GPT/b"])
    ('GPT/block_*/mlp', 'GPT')
    """
    distinct = sorted(set(modules))
    if len(distinct) == 1:
        return distinct[0]
    starred = set(map(family, distinct))
    return starred.pop() if len(starred) == 1 else os.path.commonpath(starred) if all(starred) else ""
