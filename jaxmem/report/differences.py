"""What grew and what shrank from one report to another: as records, and as JSON values."""

import dataclasses
import os
import re
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from jaxmem._shown import Brief, JsonRecord, one_line
from jaxmem._units import format_bytes
from jaxmem.analysis import Buffer, MemoryReport
from jaxmem.report._page import in_order

_SETTINGS = ("target", "backend", "devices", "jax_version")
_SIDE = ("name", "target", "backend", "jax_version", "remat", "peak_bytes", "fits")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change(Brief):
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
class SettingChange(Brief):
    """Something that two programs were made with, and that differs; empty where one of the reports does not tell."""

    name: str
    before: str
    after: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diff(JsonRecord):
    """What changed between two reports, the largest changes first.

    Args:
      before, after: the reports.
      settings: in which their programs were made otherwise: config, batch, options, target, versions.
      kinds: all there are, in their fixed order.
      names: by the argument's path or the name of a saved value, whatever kinds the bytes are of.
      layers: by layer.
      buffers: by what they hold and where that is computed.
    """

    before: MemoryReport
    after: MemoryReport
    settings: tuple[SettingChange, ...] = ()
    kinds: tuple[Change, ...]
    names: tuple[Change, ...] = ()
    layers: tuple[Change, ...]
    buffers: tuple[Change, ...]

    def __repr__(self) -> str:
        sides = [("before", self.before), ("after", self.after)]
        told = [(side, f"{one.name!r} on {one.target}, {format_bytes(one.peak_bytes)}") for side, one in sides]
        return one_line("Diff", [*told, ("", f"{len(self.layers)} layers and {len(self.buffers)} buffers changed")])

    def to_dict(self) -> dict[str, Any]:
        """JSON values: `before` and `after` in short, then `settings`, `kinds`, `names`, `layers` and `buffers`."""
        sides = {"before": self.before, "after": self.after}
        parts = {"kinds": self.kinds, "names": self.names, "layers": self.layers, "buffers": self.buffers}
        return {
            **{
                name: {field: getattr(report, field) for field in _SIDE}
                | {"phases": {phase.name: phase.peak_bytes for phase in report.phases}}
                for name, report in sides.items()
            },
            "settings": [dataclasses.asdict(change) for change in self.settings],
            **{
                name: [{**dataclasses.asdict(change), "change_bytes": change.change_bytes} for change in changes]
                for name, changes in parts.items()
            },
        }


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
    named = [_grouped((b for b in report.buffers if _name(b)), lambda b: (family(_name(b)),)) for report in reports]
    return Diff(
        before=before,
        after=after,
        settings=_settings(*reports),
        names=_changes(named, _name_change),
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


def _settings(before: MemoryReport, after: MemoryReport) -> tuple[SettingChange, ...]:
    """What differs; what only one report tells of, unless the other is older and tells nothing at all."""
    sides = [{each.name: each.value for each in report.settings} for report in (before, after)]
    told = all(sides)
    for side, report in zip(sides, (before, after), strict=True):
        side.update({name: str(getattr(report, name)) for name in _SETTINGS})
        side.setdefault("remat", report.remat)
    names = dict.fromkeys([*sides[0], *sides[1]])
    changes = [SettingChange(name=n, before=sides[0].get(n, ""), after=sides[1].get(n, "")) for n in names]
    return tuple(c for c in changes if c.before != c.after and (told or (c.before and c.after)))


def _name(b: Buffer) -> str:
    """The argument that a buffer holds, belongs to or is a copy of, or the name under which it is saved."""
    return b.path or b.saved_name


def _what(b: Buffer) -> tuple[str, ...]:
    file, _, line = b.source.rpartition(":")  # a notebook's cell gets another number whenever it runs
    return b.kind, family(b.layer), family(_name(b)), b.op, os.path.basename(b.source_file) or file, line


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


def _name_change(before: list[Buffer], after: list[Buffer]) -> Change:
    name = _common(_name(b) for b in [*before, *after])
    kinds = in_order(b.kind for b in [*before, *after])
    return Change(
        name=name,
        kind=kinds[0] if len(kinds) == 1 else "",
        before_bytes=_bytes(before),
        after_bytes=_bytes(after),
    )


def _buffers_change(before: list[Buffer], after: list[Buffer]) -> Change:
    both = [*before, *after]
    first = both[0]
    return Change(
        name=_common(map(_name, both)) or first.op or first.name,
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
