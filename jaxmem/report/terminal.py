"""Reports and comparisons for a terminal, as rich renderables."""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from jaxmem._display import table_columns
from jaxmem._units import format_bytes, format_share
from jaxmem.analysis import Comparison, MemoryReport
from jaxmem.report._views import label, numbers, other_phases, said_of

_BAR, _SHOWN_SHARE, _LARGEST, _FINDINGS = 30, 0.005, 8, 5
_INDENT = 12  # characters, at most, of what continues a row

_FITS_STYLE = {"yes": "green", "no": "red", "uncertain": "yellow"}


def table(headings: Sequence[str], right: Collection[str] = (), *, header: bool = True) -> Table:
    """A table without lines, the columns in `right` set to the right; see `WholeCells`."""
    made = WholeCells(box=None, show_header=header, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for heading in headings:
        made.add_column(heading, justify="right" if heading in right else "left", no_wrap=True)
    return made


class WholeCells(Table):
    """A table that breaks no cell: where the width is too small, each row goes on in lines below, indented."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if _width(console, options, self) <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        heads = [[_text(console, column.header) for column in self.columns]] if self.show_header else []
        rows = list(zip(*([_text(console, c) for c in column.cells] for column in self.columns), strict=True))
        widths = [max(cell.cell_len for cell in column) for column in zip(*heads, *rows, strict=True)]
        beside = 1  # how many columns stand beside one another in the first line of a row
        while sum(widths[: beside + 1]) + 2 * beside <= options.max_width:
            beside += 1
        styles = [self.header_style] * len(heads) + [row.style or "" for row in self.rows]
        for cells, style in zip([*heads, *rows], styles, strict=True):
            line, rest = Text(style=style), [cell for cell in cells[beside:] if cell.plain]
            for cell, width, column in zip(cells[:beside], widths, self.columns, strict=False):
                space = " " * (width - cell.cell_len)
                line.append_text(Text.assemble(space, cell) if column.justify == "right" else cell.copy().append(space))
                line.append("  ")
            line.rstrip()
            yield line
            if rest:
                yield Padding(Text("  ", style=style).join(rest), (0, 0, 0, min(widths[0], _INDENT) + 2))


def _width(console: Console, options: ConsoleOptions, made: Table) -> int:
    """The width that a table takes if it may."""
    return Measurement.get(console, options.update(width=10_000), made).maximum


def _text(console: Console, cell: Any) -> Text:
    return console.render_str(cell) if isinstance(cell, str) else cell


def print_report(report: MemoryReport, console: Console | None = None) -> None:
    """Prints a `MemoryReport` on `console`, or on stdout."""
    (console or Console()).print(render_report(report))


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Prints a `Comparison` on `console`, or on stdout."""
    (console or Console()).print(render_comparison(comparison))


def render_report(report: MemoryReport) -> Group:
    """A `MemoryReport` as a titled list of numbers, the verdict, and the warnings."""
    listed = table(("number", "value"), right=("value",), header=False)
    for number in numbers(report, "terminal"):
        listed.add_row(number.heading, number.text)
    verdict = Text.assemble("fits: ", (report.fits, _FITS_STYLE[report.fits]), f" - {report.fits_reason}")
    return Group(
        _title(f"{report.name} - target {report.target}", [report]),
        listed,
        *_kinds(report),
        *_largest(report),
        *_findings(report),
        Text(),
        verdict,
        *_phases(report),
        *_notes([report]),
    )


def render_comparison(comparison: Comparison) -> Group:
    """A `Comparison` as a table with a line a variant, and the warnings with the variants they concern.

    Where the terminal is too narrow for all columns, the others follow in a second table.
    """
    rows = comparison.rows
    return Group(
        _title(f"target {comparison.target}", rows),
        _of_rows(rows),
        *_verdicts(rows),
        *(Text(f"\n{name}: {why}") for name, why in comparison.refused),
        *(Text(f"\n{choice}", style=f"bold {_FITS_STYLE[choice.fits]}") for choice in comparison.choices),
        *_notes(rows),
    )


class Columns:
    """As many tables below one another as the width asks for, each with some of the columns beside the names.

    Args:
      names: heading and cells of the first column, which every table repeats.
      columns: headings and cells of the others, which are set to the right.
    """

    def __init__(self, names: tuple[str, Sequence[Text]], columns: Sequence[tuple[str, Sequence[Text]]]):
        self.names, self.columns = names, columns

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left = list(self.columns)
        while left:
            count = len(left)
            while count > 1 and _width(console, options, self._table(left[:count])) > options.max_width:
                count -= 1
            yield self._table(left[:count])
            left = left[count:]
            if left:
                yield ""

    def _table(self, shown: Sequence[tuple[str, Sequence[Text]]]) -> Table:
        headings, columns = zip(self.names, *shown, strict=True)
        made = table(headings, right=headings[1:])
        for row in zip(*columns, strict=True):
            made.add_row(*row)
        return made


def _of_rows(rows: Sequence[MemoryReport]) -> Columns:
    """One line a variant; what lies on the host only if any does."""
    offloads = any(row.host_temp_bytes for row in rows)
    shown = [each for each in table_columns(rows, "row") if offloads or each.name != "host_temp_bytes"]
    cells = [(each.headings["row"], [each.text(row) for row in rows]) for each in shown]
    styled = [(heading, [Text(cell, style=_FITS_STYLE.get(cell, "")) for cell in texts]) for heading, texts in cells]
    return Columns(("variant", [Text(row.name) for row in rows]), styled)


def _kinds(report: MemoryReport) -> list:
    """The peak by kind, with a bar."""
    if not report.by_kind:
        return []
    total = sum(size for _, size in report.by_kind) or 1
    made = table(("kind", "bytes", "share", "bar"), right=("bytes", "share"), header=False)
    small = sum(size for _, size in report.by_kind if size < _SHOWN_SHARE * total)
    rows = [(kind, size) for kind, size in report.by_kind if size >= _SHOWN_SHARE * total]
    for kind, size in [*rows, ("others", small)] if small else rows:
        bar = "█" * round(_BAR * size / total)
        made.add_row(label(kind), format_bytes(size), format_share(size, total), Text(bar, style="cyan"))
    return [Text("\nat the peak", style="bold"), made]


def _largest(report: MemoryReport) -> list:
    """The buffers at the peak that take most, those of one operation together."""
    groups: dict[tuple, list[int]] = {}
    for b in report.buffers:
        if b.op not in ("parameter", "output"):
            groups.setdefault((b.kind, b.phase, b.layer, b.op, b.source), []).append(b.size_bytes)
    if not groups:
        return []
    made = table(("bytes", "kind", "layer", "op", "source"), right=("bytes",))
    largest = sorted(groups.items(), key=lambda item: -sum(item[1]))[:_LARGEST]
    for (kind, phase, layer, op, source), sizes in largest:
        many = f" × {len(sizes)}" if len(sizes) > 1 else ""
        cells = Text(layer or "-"), Text(f"{op}{many}"), Text(source or phase)
        made.add_row(format_bytes(sum(sizes)), label(kind), *cells)
    return [Text("\nlargest temporaries at the peak", style="bold"), made]


def _findings(report: MemoryReport) -> list:
    if not report.findings:
        return []
    made = _grid("right")
    cured = ""
    for finding in report.findings[:_FINDINGS]:
        cure, cured = ("" if finding.cure == cured else f"\n→ {finding.cure}"), finding.cure
        about = "about " if finding.estimated else ""
        size = Text(f"{about}{format_bytes(finding.size_bytes)}" if finding.size_bytes else "", style="yellow")
        proof = (f"\n{finding.proof}", "green" if finding.tried else "dim") if finding.proof else ""
        made.add_row(size, Text.assemble(finding.title, (cure, "dim"), proof))
    more = len(report.findings) - _FINDINGS
    rest = [Text(f"and {more} more: --json or --html shows them", style="dim")] if more > 0 else []
    return [Text("\nwhat costs bytes", style="bold"), made, *rest]


def _phases(report: MemoryReport) -> list[Text]:
    told = [text for text, _ in other_phases(report)]
    return [Text(f"besides the steps: {', '.join(told)}")] if told else []


def _title(text: str, rows: Sequence[MemoryReport]) -> Text:
    first = rows[0]
    return Text.assemble((text, "bold"), f" - {first.provenance} by {first.backend}, jax {first.jax_version}\n")


def _verdicts(rows: Sequence[MemoryReport]) -> Iterable[Text]:
    return [Text(f"\n{row.name}: fits {row.fits}, {row.fits_reason}") for row in rows if row.fits != "yes"]


def _notes(rows: Sequence[MemoryReport]) -> list:
    said = "\n* modelled from the trace; the rest is from the compiler. Times are estimates."
    if any("^" in each.headings["row"] for each in table_columns(rows, "row")):
        said += "\n^ measured on this machine."
    legend = Text(said, style="dim")
    made = _grid("left")
    for mark, style, field in (("!", "yellow", "warnings"), ("·", "dim", "notes")):
        for sentence, names in said_of(rows, field):
            made.add_row(Text(mark, style=style), Text(f"{names}: {sentence}" if names else sentence))
    return [legend, made] if made.row_count else [legend]


def _grid(justify) -> Table:
    """Marks, and sentences beside them."""
    made = Table.grid(padding=(0, 1, 0, 0))
    made.add_column(justify=justify, no_wrap=True)
    made.add_column(overflow="fold")
    return made
