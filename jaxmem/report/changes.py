"""What changed between two reports, for a terminal, as rich renderables."""

from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxmem._display import columns
from jaxmem._units import format_bytes
from jaxmem.analysis import MemoryReport
from jaxmem.report._views import format_change, label
from jaxmem.report.differences import Change, Diff, SettingChange
from jaxmem.report.terminal import table

_SHOWN = 10


def render_diff(found: Diff) -> Group:
    """The totals, every kind, and the layers and buffers that changed most, for a terminal."""
    before, after = found.before, found.after
    totals = [
        (each.headings["diff"], getattr(before, each.name), getattr(after, each.name))
        for each in columns(type(after), "diff")
    ]
    totals += _phases(before, after)
    layers = [(c.name or "(in no layer)", c.before_bytes, c.after_bytes) for c in found.layers[:_SHOWN]]
    parts = [
        Text.assemble((f"{_printable(before.name)} → {_printable(after.name)}", "bold"), f" - {_where(found)}\n"),
        *_set(found.settings),
        _sizes("", [row for row in totals if None not in row]),
        Text("\nat the peak, by kind", style="bold"),
        _sizes("kind", [(label(c.name), c.before_bytes, c.after_bytes) for c in found.kinds]),
    ]
    named = [(c.name, c.before_bytes, c.after_bytes) for c in found.names[:_SHOWN]]
    if named:
        parts += [Text("\nby name: arguments, saved values", style="bold"), _sizes("name", named), *_more(found.names)]
    if layers:
        parts += [Text("\nlayers that changed most", style="bold"), _sizes("layer", layers), *_more(found.layers)]
    if found.buffers:
        parts += [Text("\nbuffers that changed most", style="bold"), _buffers(found.buffers), *_more(found.buffers)]
    if not (found.layers or found.buffers):
        parts.append(Text("\nNo layer and no buffer changed."))
    parts.append(Text(f"\nfits: {' → '.join(dict.fromkeys((before.fits, after.fits)))}"))
    return Group(*parts, *(Text(f"! {note}", style="yellow") for note in _notes(before, after)))


def _phases(before: MemoryReport, after: MemoryReport) -> list[tuple[str, int | None, int | None]]:
    """The phases of a run, but the steps, whose peaks differ."""
    sides = [{p.name: p.peak_bytes for p in report.phases if p.name != "step"} for report in (before, after)]
    names = [name for name in sides[0] if name in sides[1]]
    return [(name, sides[0][name], sides[1][name]) for name in names if sides[0][name] != sides[1][name]]


def _set(changes: Sequence[SettingChange]) -> list:
    """What the programs were made with, where it differs."""
    if not changes:
        return []
    made = table(("setting", "before", "after"))
    for c in changes:
        made.add_row(*(Text(_printable(text)) for text in (c.name, c.before or "not set", c.after or "not set")))
    return [made, Text()]


def _where(found: Diff) -> str:
    places = [f"{_printable(r.target)}, jax {_printable(r.jax_version)}" for r in (found.before, found.after)]
    return " → ".join(dict.fromkeys(places))


def _notes(before: MemoryReport, after: MemoryReport) -> list[str]:
    notes = []
    if before.target != after.target:
        notes.append("The targets differ: what each compiler does with one program differs too.")
    elif before.jax_version != after.jax_version:
        notes.append("The versions of JAX differ: some of this may be the compiler's doing.")
    bare = [_printable(report.name) for report in (before, after) if not report.buffers]
    if bare:
        notes.append(f"No buffers are known of {' and '.join(bare)}.")
    return notes


def _sizes(heading: str, rows: Sequence[tuple[str, int, int]]) -> Table:
    sides = ("before", "after", "change")
    made = table((heading, *sides), right=sides)
    for name, before, after in rows:
        if before or after:
            made.add_row(Text(_printable(name)), format_bytes(before), format_bytes(after), _change(after - before))
    return made


def _buffers(changes: Sequence[Change]) -> Table:
    made = table(("change", "what", "kind", "layer", "before → after", "source"), right=("change",))
    for c in changes[:_SHOWN]:
        shapes = c.after if c.before == c.after else f"{c.before or 'none'} → {c.after or 'none'}"
        cells = (c.name, label(c.kind), c.layer or "-", shapes, c.source)
        made.add_row(_change(c.change_bytes), *(Text(_printable(cell)) for cell in cells))
    return made


def _more(changes: Sequence[Change]) -> list[Text]:
    more = len(changes) - _SHOWN
    return [Text(f"and {more} more: --json or --html shows them", style="dim")] if more > 0 else []


def _change(size: int) -> Text:
    return Text(format_change(size) if size else "", style="red" if size > 0 else "green")


def _printable(text: str) -> str:
    """Text from a file, without what a terminal takes for a command."""
    return "".join(character if character.isprintable() else "�" for character in text)
