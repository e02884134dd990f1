"""What a notebook shows: one piece of HTML with its own styles and without scripts.

It is read in many places. Jupyter, VS Code and Colab show it as it is, in their own theme. GitHub and notebooks that
are not trusted strip styles and pictures: there its text and tables remain.
"""

import re
from typing import Any

from jaxmem._units import format_bytes
from jaxmem.analysis import Comparison, MemoryReport
from jaxmem.remat import Frontier
from jaxmem.report._chart import frontier_chart, scale_of, timeline_chart
from jaxmem.report._from_rich import as_html
from jaxmem.report._views import comparison_view, label, report_view, said_of, segments
from jaxmem.report.changes import render_diff
from jaxmem.report.differences import Diff
from jaxmem.report.frontier import render_frontier
from jaxmem.report.html import asset, rendered

_TOP, _FINDINGS = 8, 5
_NAMED_SHARE = 0.005  # of a peak: smaller kinds are named together
_COLOUR = re.compile(r"^\s*(--[\w-]+: light-dark\([^)]*\);)$", re.MULTILINE)
_KIND = re.compile(r"^(\.kind-[\w-]+ \{ --kind: [^}]*\})$", re.MULTILINE)


def report_body(report: MemoryReport) -> str:
    """The verdict, the peak by kind, the timeline, the largest buffers, findings, and all numbers."""
    scale, shown = scale_of([report.peak_bytes], report.capacity_bytes)
    return rendered(
        "notebook.html.jinja",
        part="report",
        view=report_view(report),
        parts=segments(report, scale),
        **_legend(report),
        capacity=_capacity(report, scale) if shown else "",
        chart=timeline_chart(report),
        buffers=report.buffers[:_TOP],
        findings=report.findings[:_FINDINGS],
        more=report.findings[_FINDINGS:],
        warnings=said_of([report], "warnings"),
    )


def comparison_body(comparison: Comparison) -> str:
    """One table, a line a variant, with bars of one scale."""
    rows = comparison.rows
    capacities = {row.capacity_bytes for row in rows}
    capacity = capacities.pop() if len(capacities) == 1 else None
    scale, shown = scale_of([row.peak_bytes for row in rows], capacity)
    view = comparison_view(rows)
    named = {label(kind) for row in rows for kind, size in row.by_kind if size >= _NAMED_SHARE * (row.peak_bytes or 0)}
    for row, report in zip(view["rows"], rows, strict=True):
        row["bar"] = segments(report, scale)
    return rendered(
        "notebook.html.jinja",
        part="comparison",
        view=view,
        legend=[(name, style) for name, style in view["kinds"] if name in named],
        target=comparison.target,
        origin=report_view(rows[0])["origin"] if rows else "",
        capacity=_capacity(rows[0], scale) if shown else "",
        capacity_bytes=capacity,
        refused=comparison.refused,
        warnings=said_of(rows, "warnings"),
    )


def diff_body(found: Diff) -> str:
    """Two bars of one scale above the tables of what changed."""
    sides = (found.before, found.after)
    scale, shown = scale_of([side.peak_bytes for side in sides], found.after.capacity_bytes)
    return rendered(
        "notebook.html.jinja",
        part="diff",
        sides=[(side, segments(side, scale)) for side in sides],
        capacity=_capacity(found.after, scale) if shown else "",
        tables=_safe(as_html(render_diff(found))),
    )


def frontier_body(frontier: Frontier) -> str:
    """The curve, with a mark for each policy, above its table."""
    return rendered(
        "notebook.html.jinja",
        part="frontier",
        what=f"{frontier.provenance}; round: chosen, square: JAX's own policies, dotted: no choice is cheaper",
        chart=frontier_chart(frontier),
        tables=_safe(as_html(render_frontier(frontier))),
    )


def wrapped(body: str) -> str:
    """A piece with its styles, none of which reaches beyond it."""
    return f'<div class="jaxmem"><style>{styles()}</style>\n{body}</div>'


def page_of(title: str, piece: str) -> str:
    """A whole page of one piece."""
    return rendered("piece.html.jinja", title=title, piece=_safe(piece))


def styles() -> str:
    """One block of CSS, all of it inside of `.jaxmem`: the colours of the kinds are those of the page."""
    kinds = asset("kinds.css")
    colours, classes = "".join(_COLOUR.findall(kinds)), "".join(_KIND.findall(kinds))
    text = re.sub(r"/\*.*?\*/", "", asset("notebook.css"), flags=re.DOTALL)
    text = text.replace("KINDS;", colours + classes)
    return re.sub(r"\s*([{};])\s*", r"\1", text).strip()


def _legend(report: MemoryReport) -> dict[str, Any]:
    """The kinds that are worth a name, and the bytes of the others in words."""
    least = _NAMED_SHARE * (report.peak_bytes or 0)
    small = sum(size for _, size in report.by_kind if size < least)
    big = {label(kind) for kind, size in report.by_kind if size >= least}
    shown = [part for part in segments(report, report.peak_bytes or 0) if part.label in big or not report.by_kind]
    return {"legend": shown, "others": format_bytes(small) if small else ""}


def _capacity(report: MemoryReport, scale: int) -> dict[str, str]:
    capacity = report.capacity_bytes or 0
    return {"left": f"{100 * capacity / scale:.2f}%", "text": f"capacity {format_bytes(capacity)}"}


def _safe(text: str):
    from markupsafe import Markup

    return Markup(text)
