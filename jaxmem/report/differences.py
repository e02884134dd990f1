"""Two reports against one another, for a terminal and as JSON values."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxmem._units import format_bytes
from jaxmem.analysis import MemoryReport
from jaxmem.report._diff import Change, diff
from jaxmem.report._views import format_change, label

_SHOWN = 10
_GREW, _SHRANK = "red", "green"


def differences(before: MemoryReport, after: MemoryReport) -> dict[str, Any]:
    """The changes as JSON values: `before` and `after` in short, then `kinds`, `layers` and `buffers` that changed."""
    found = diff(before, after)
    return {
        **{name: _short(report) for name, report in (("before", before), ("after", after))},
        **{
            name: [{**dataclasses.asdict(change), "change_bytes": change.change_bytes} for change in changes]
            for name, changes in (("kinds", found.kinds), ("layers", found.layers), ("buffers", found.buffers))
        },
    }


def _short(report: MemoryReport) -> dict[str, Any]:
    names = ("name", "target", "backend", "jax_version", "remat", "peak_bytes", "fits")
    return {name: getattr(report, name) for name in names}


def render_differences(before: MemoryReport, after: MemoryReport) -> Group:
    """What grew and shrank: the peak, every kind, and the layers and buffers that changed most."""
    found = diff(before, after)
    totals = [
        (name.replace("_bytes", "").replace("_", " "), getattr(before, name), getattr(after, name))
        for name in ("peak_bytes", "argument_bytes", "temp_bytes", "saved_residual_bytes")
    ]
    parts = [
        Text.assemble((f"{_shown(before.name)} → {_shown(after.name)}", "bold"), f" - {_where(before, after)}\n"),
        _table("", [(name, *sizes) for name, *sizes in totals if None not in sizes]),
        Text("\nat the peak, by kind", style="bold"),
        _table("kind", [(label(c.name), c.before_bytes, c.after_bytes) for c in found.kinds]),
    ]
    if found.layers:
        parts += [Text("\nlayers that changed most", style="bold"), *_layers(found.layers)]
    if found.buffers:
        parts += [Text("\nbuffers that changed most", style="bold"), *_buffers(found.buffers)]
    if not (found.layers or found.buffers):
        parts.append(Text("\nNo layer and no buffer changed."))
    verdict = before.fits, after.fits
    parts.append(Text(f"\nfits: {verdict[0]} → {verdict[1]}" if len(set(verdict)) > 1 else f"\nfits: {verdict[0]}"))
    return Group(*parts, *(Text(f"! {note}", style="yellow") for note in _notes(before, after)))


def _where(before: MemoryReport, after: MemoryReport) -> str:
    places = [f"{_shown(report.target)}, jax {_shown(report.jax_version)}" for report in (before, after)]
    return places[0] if places[0] == places[1] else " → ".join(places)


def _notes(before: MemoryReport, after: MemoryReport) -> list[str]:
    notes = []
    if before.target != after.target:
        notes.append("The targets differ: what each compiler does with one program differs too.")
    elif before.jax_version != after.jax_version:
        notes.append("The versions of JAX differ: some of this may be the compiler's doing.")
    bare = [_shown(report.name) for report in (before, after) if not report.buffers]
    if bare:
        notes.append(f"No buffers are known of {' and '.join(bare)}.")
    return notes


def _table(heading: str, rows: Sequence[tuple[str, int, int]]) -> Table:
    table = _columns(heading, "before", "after", "change")
    for name, before, after in rows:
        if before or after:
            table.add_row(Text(_shown(name)), format_bytes(before), format_bytes(after), _change(after - before))
    return table


def _layers(changes: Sequence[Change]) -> list:
    table = _columns("layer", "before", "after", "change")
    for c in changes[:_SHOWN]:
        name = _shown(c.name) or "(in no layer)"
        table.add_row(Text(name), format_bytes(c.before_bytes), format_bytes(c.after_bytes), _change(c.change_bytes))
    return [table, *_more(changes)]


def _buffers(changes: Sequence[Change]) -> list:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("change", justify="right", no_wrap=True)
    for heading in ("what", "kind", "layer", "before → after", "source"):
        table.add_column(heading, overflow="fold")
    for c in changes[:_SHOWN]:
        shapes = f"{_shown(c.before) or 'none'} → {_shown(c.after) or 'none'}"
        shapes = _shown(c.after) if c.before == c.after else shapes
        cells = (_shown(c.name), label(_shown(c.kind)), _shown(c.layer) or "-", shapes, _shown(c.source))
        table.add_row(_change(c.change_bytes), *(Text(cell) for cell in cells))
    return [table, *_more(changes)]


def _more(changes: Sequence[Change]) -> list[Text]:
    more = len(changes) - _SHOWN
    return [Text(f"and {more} more: --json or --html shows them", style="dim")] if more > 0 else []


def _columns(first: str, *others: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _change(size: int) -> Text:
    return Text(format_change(size) if size else "", style=_GREW if size > 0 else _SHRANK)


def _shown(text: str) -> str:
    """Text from a file, without what a terminal takes for a command."""
    return "".join(character if character.isprintable() else "�" for character in text)
