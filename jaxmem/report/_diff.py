"""Which kinds, layers and buffers grew or shrank from one report to another."""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Iterable

from jaxmem.analysis import Buffer, MemoryReport
from jaxmem.report._columns import in_order


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """Bytes of one thing in two reports.

    Args:
      name: of the kind or layer, or what the buffers hold; "block_*" where it is several alike.
      kind, layer, source: of the buffers; empty where the thing is of several.
      before_bytes, after_bytes: 0 where it is not there.
      before, after: how many buffers, and their shapes: "12 × f32[8,768]"; empty for kinds and layers.
    """

    name: str
    kind: str = ""
    layer: str = ""
    source: str = ""
    before_bytes: int
    after_bytes: int
    before: str = ""
    after: str = ""

    @property
    def change_bytes(self) -> int:
        """Positive where it grew."""
        return self.after_bytes - self.before_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diff:
    """What changed, the largest changes first; `kinds` are all there are, in their fixed order."""

    kinds: tuple[Change, ...]
    layers: tuple[Change, ...]
    buffers: tuple[Change, ...]


def diff(before: MemoryReport, after: MemoryReport) -> Diff:
    """The changes from `before` to `after`.

    Layers and arguments that differ in their numbers only are one. Buffers are the same in both where
    they have the same kind, layer, argument path or saved name, operation and source line; the
    compiler's own names (`fusion.12`) change with every edit.
    """
    reports = before, after
    kinds = [dict(report.by_kind) for report in reports]
    layers = [_grouped(report.by_layer, lambda row: (family(row.layer),)) for report in reports]
    buffers = [_grouped(report.buffers, _what) for report in reports]
    return Diff(
        kinds=tuple(
            Change(name=kind, kind=kind, before_bytes=kinds[0].get(kind, 0), after_bytes=kinds[1].get(kind, 0))
            for kind in in_order(kinds[0].keys() | kinds[1].keys())
        ),
        layers=_changes(layers, _layer_change),
        buffers=_changes(buffers, _buffers_change),
    )


def family(name: str) -> str:
    """A name without its numbers.

    >>> family("GPT/block_11/mlp")
    'GPT/block_*/mlp'
    """
    return re.sub(r"\d+", "*", name)


def _what(b: Buffer) -> tuple[str, ...]:
    return b.kind, family(b.layer), family(b.path or b.saved_name), b.op, b.source


def _grouped(rows: Iterable, key) -> dict[tuple[str, ...], list]:
    groups: dict[tuple[str, ...], list] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    return groups


def _changes(groups: list[dict], make) -> tuple[Change, ...]:
    before, after = groups
    every = [make(before.get(key, []), after.get(key, [])) for key in before.keys() | after.keys()]
    changed = [change for change in every if change.change_bytes]
    return tuple(sorted(changed, key=lambda c: (-abs(c.change_bytes), c.name, c.kind, c.layer, c.source)))


def _bytes(rows: list) -> int:
    return sum(row.size_bytes for row in rows)


def _common(names: Iterable[str]) -> str:
    """The name that all have, or their family."""
    distinct = set(names)
    return distinct.pop() if len(distinct) == 1 else family(distinct.pop())


def _layer_change(before: list, after: list) -> Change:
    name = _common(row.layer for row in [*before, *after])
    return Change(name=name, layer=name, before_bytes=_bytes(before), after_bytes=_bytes(after))


def _buffers_change(before: list[Buffer], after: list[Buffer]) -> Change:
    both = [*before, *after]
    first = both[0]
    return Change(
        name=_common(b.path or b.saved_name for b in both) or first.op or first.name,
        kind=first.kind,
        layer=_common(b.layer for b in both),
        source=first.source,
        before_bytes=_bytes(before),
        after_bytes=_bytes(after),
        before=_shapes(before),
        after=_shapes(after),
    )


def _shapes(buffers: list[Buffer]) -> str:
    """How many, and the largest shape: `3 × f32[8], …`; empty for none."""
    if not buffers:
        return ""
    largest = max(buffers, key=lambda b: b.size_bytes).shape
    more = ", …" if len({b.shape for b in buffers}) > 1 else ""
    return f"{len(buffers)} × {largest}{more}" if len(buffers) > 1 else largest
