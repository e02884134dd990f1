"""Reports and comparisons for a terminal, as rich renderables."""

from collections.abc import Callable, Iterable, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from jaxmem._units import format_bytes, format_flops, format_seconds
from jaxmem.analysis import Comparison, MemoryReport
from jaxmem.report._dtypes import state_dtypes

_Cell = Callable[[MemoryReport], str]

# Heading, and what stands under it. In a table the most telling come first: the rest wraps to further tables.
_COLUMNS: tuple[tuple[str, _Cell], ...] = (
    ("peak", lambda r: format_bytes(r.peak_bytes)),
    ("temps", lambda r: format_bytes(r.temp_bytes)),
    ("residuals*", lambda r: format_bytes(r.saved_residual_bytes)),
    ("recompute", lambda r: format_flops(r.recompute_flops)),
    ("time~", lambda r: format_seconds(r.step_seconds)),
    ("fits", lambda r: r.fits),
    ("forward*", lambda r: format_flops(r.forward_flops)),
    ("arguments", lambda r: format_bytes(r.argument_bytes)),
    ("outputs", lambda r: format_bytes(r.output_bytes)),
    ("aliased", lambda r: format_bytes(r.alias_bytes)),
    ("host temps", lambda r: format_bytes(r.host_temp_bytes)),
)

_LINES: tuple[tuple[str, _Cell], ...] = (
    ("peak", lambda r: format_bytes(r.peak_bytes)),
    ("  arguments", lambda r: format_bytes(r.argument_bytes)),
    ("  outputs", lambda r: format_bytes(r.output_bytes)),
    ("  temporaries", lambda r: format_bytes(r.temp_bytes)),
    ("  aliased", lambda r: format_bytes(r.alias_bytes)),
    ("compiler's own peak", lambda r: format_bytes(r.compiler_peak_bytes)),
    ("generated code", lambda r: format_bytes(r.generated_code_bytes)),
    ("host temporaries", lambda r: format_bytes(r.host_temp_bytes)),
    ("saved residuals*", lambda r: format_bytes(r.saved_residual_bytes)),
    ("forward*", lambda r: format_flops(r.forward_flops)),
    ("whole program", lambda r: format_flops(r.flops)),
    ("recomputed", lambda r: format_flops(r.recompute_flops)),
    ("gradients reduced", lambda r: _reduced(r)),
    ("time of a step (estimate)", lambda r: format_seconds(r.step_seconds)),
)

_BAR, _SHOWN_SHARE, _LARGEST, _FINDINGS = 30, 0.005, 8, 5

_FITS_STYLE = {"yes": "green", "no": "red", "uncertain": "yellow"}


def _reduced(report: MemoryReport) -> str:
    if report.gradient_reductions is None:
        return "-"
    return f"{report.gradient_reductions:.3g} x, {format_bytes(report.gradient_reduction_bytes)}"


def print_report(report: MemoryReport, console: Console | None = None) -> None:
    """Prints a `MemoryReport` on `console`, or on stdout."""
    (console or Console()).print(render_report(report))


def print_comparison(comparison: Comparison, console: Console | None = None) -> None:
    """Prints a `Comparison` on `console`, or on stdout."""
    (console or Console()).print(render_comparison(comparison))


def render_report(report: MemoryReport) -> Group:
    """A `MemoryReport` as a titled list of numbers, the verdict, and the warnings."""
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    for heading, cell in _LINES:
        table.add_row(heading, cell(report))
        if heading == "  arguments":
            for kind, dtypes in state_dtypes(report):
                table.add_row(f"    {kind}", dtypes)
    verdict = Text.assemble("fits: ", (report.fits, _FITS_STYLE[report.fits]), f" - {report.fits_reason}")
    return Group(
        _title(f"{report.name} - target {report.target}", [report]),
        table,
        *_kinds(report),
        *_largest(report),
        *_findings(report),
        Text(),
        verdict,
        *_notes([report]),
    )


def render_comparison(comparison: Comparison) -> Group:
    """A `Comparison` as a table with a line a variant, and the warnings with the variants they concern.

    Where the terminal is too narrow for all columns, the others follow in a second table.
    """
    rows = comparison.rows
    return Group(
        _title(f"target {comparison.target}", rows),
        _Columns(rows),
        *_verdicts(rows),
        *(Text(f"\n{name}: {why}") for name, why in comparison.refused),
        *_notes(rows),
    )


class _Columns:
    """One line a variant; as many tables below one another as the width asks for."""

    def __init__(self, rows: Sequence[MemoryReport]):
        self.rows = rows

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        left = list(_COLUMNS)
        first = True
        while left:
            count = len(left)
            while count > 1 and self._width(console, options, left[:count]) > options.max_width:
                count -= 1
            if not first:
                yield ""
            yield self._table(left[:count])
            left, first = left[count:], False

    def _width(self, console, options, columns) -> int:
        return Measurement.get(console, options.update(width=10_000), self._table(columns)).maximum

    def _table(self, columns) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
        table.add_column("variant", overflow="fold")
        for heading, _ in columns:
            table.add_column(heading, justify="right", no_wrap=True)
        for row in self.rows:
            cells = [Text(cell(row), style=_FITS_STYLE.get(cell(row), "")) for _, cell in columns]
            table.add_row(Text(row.name), *cells)
        return table


def _kinds(report: MemoryReport) -> list:
    """The peak by kind, with a bar."""
    if not report.by_kind:
        return []
    total = sum(size for _, size in report.by_kind) or 1
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    small = sum(size for _, size in report.by_kind if size < _SHOWN_SHARE * total)
    rows = [(kind, size) for kind, size in report.by_kind if size >= _SHOWN_SHARE * total]
    for kind, size in [*rows, ("others", small)] if small else rows:
        bar = "█" * round(_BAR * size / total)
        table.add_row(kind.replace("_", " "), format_bytes(size), f"{size / total:.0%}", Text(bar, style="cyan"))
    return [Text("\nat the peak", style="bold"), table]


def _largest(report: MemoryReport) -> list:
    """The buffers at the peak that take most, those of one operation together."""
    groups: dict[tuple, list[int]] = {}
    for b in report.buffers:
        if b.op not in ("parameter", "output"):
            groups.setdefault((b.kind, b.phase, b.layer, b.op, b.source), []).append(b.size_bytes)
    if not groups:
        return []
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("bytes", justify="right", no_wrap=True)
    for heading in ("kind", "layer", "op", "source"):
        table.add_column(heading, overflow="fold")
    largest = sorted(groups.items(), key=lambda item: -sum(item[1]))[:_LARGEST]
    for (kind, phase, layer, op, source), sizes in largest:
        many = f" × {len(sizes)}" if len(sizes) > 1 else ""
        table.add_row(
            format_bytes(sum(sizes)),
            kind.replace("_", " "),
            Text(layer or "-"),
            Text(f"{op}{many}"),
            Text(source or phase),
        )
    return [Text("\nlargest temporaries at the peak", style="bold"), table]


def _findings(report: MemoryReport) -> list:
    if not report.findings:
        return []
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    cured = ""
    for finding in report.findings[:_FINDINGS]:
        cure, cured = ("" if finding.cure == cured else f"\n→ {finding.cure}"), finding.cure
        about = "about " if finding.estimated else ""
        table.add_row(
            Text(f"{about}{format_bytes(finding.size_bytes)}", style="yellow"),
            Text.assemble(finding.title, (cure, "dim")),
        )
    more = len(report.findings) - _FINDINGS
    rest = [Text(f"and {more} more: --json or --html shows them", style="dim")] if more > 0 else []
    return [Text("\nwhat costs bytes", style="bold"), table, *rest]


def _title(text: str, rows: Sequence[MemoryReport]) -> Text:
    first = rows[0]
    return Text.assemble((text, "bold"), f" - {first.provenance} by {first.backend}, jax {first.jax_version}\n")


def _verdicts(rows: Sequence[MemoryReport]) -> Iterable[Text]:
    return [Text(f"\n{row.name}: fits {row.fits}, {row.fits_reason}") for row in rows if row.fits != "yes"]


def _notes(rows: Sequence[MemoryReport]) -> list:
    said = "\n* modelled from the trace; the rest is from the compiler. Times are estimates."
    legend = Text(said, style="dim")
    concerned: dict[str, list[str]] = {}
    for row in rows:
        for warning in row.warnings:
            concerned.setdefault(warning, []).append(row.name)
    table = Table.grid(padding=(0, 1, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for warning, names in concerned.items():
        of = "" if len(names) == len(rows) else f"{', '.join(names)}: "
        table.add_row(Text("!", style="yellow"), Text(of + warning))
    return [legend, table] if concerned else [legend]
