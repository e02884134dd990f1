"""One self-contained HTML page of a report, a comparison or a diff."""

import functools
import importlib.resources
import json
import os
import re
from pathlib import Path
from typing import Any

from jaxmem._source import short_name
from jaxmem._units import format_bytes
from jaxmem.analysis import KINDS, Comparison, MemoryReport
from jaxmem.errors import InputError
from jaxmem.report._page import buffer_fields, report_data
from jaxmem.report._views import comparison_view, format_change, frontier_points, label, report_view, segments, style
from jaxmem.report.differences import Diff, diff

_STYLES = ("kinds", "groups", "report")
_SCRIPTS = (
    *("page", "units", "theme", "groups", "tables", "buffers", "alive", "layer_table"),
    *("layers", "phases", "timeline", "moment", "map", "frontier", "main"),
)
_MOST_DATA = 3_000_000  # with plotly's 4.8 MB the page stays below 8 MB
_WRAPPED = re.compile(
    r'"use strict";\s*var Plotly=\(\(\)=>\{(?P<body>.*)return (?P<made>[\w$]+\(\));\}\)\(\);(?P<notices>.*)'
    r"window\.Plotly = Plotly;",
    re.DOTALL,
)
_MOST_CHANGES = 200
_LISTED = ("names", "layers", "buffers")


def html_report(report: MemoryReport | Comparison, *, against: MemoryReport | None = None) -> str:
    """A page that needs no network and no other file.

    Args:
      report: what is shown.
      against: an earlier report; the page then begins with what grew and shrank since.

    Raises:
      InputError: neither a report nor a comparison, or a comparison against something.

    >>> import jax
    >>> from jaxmem.analysis import analyze
    >>> report = analyze(lambda x: x @ x, jax.ShapeDtypeStruct((8, 8), "float32"), target="cpu")
    >>> html_report(report).startswith("<!doctype html>")
    True
    """
    if against is not None and not (isinstance(report, MemoryReport) and isinstance(against, MemoryReport)):
        raise InputError(
            wanted="two MemoryReports to tell the difference between",
            got=f"{type(report).__name__} against {type(against).__name__}",
            do="Pick the rows: html_report(comparison['full'], against=comparison['none']).",
        )
    if isinstance(report, Comparison):
        reports, mode, title = list(report.rows), "comparison", f"{len(report.rows)} variants on {report.target}"
    elif isinstance(report, MemoryReport):
        reports, mode, title = [report], "report", f"{report.name} on {report.target}"
        if against is not None:
            reports, mode, title = [against, report], "diff", f"{report.name} against {against.name}"
    else:
        raise InputError(
            wanted="a MemoryReport or a Comparison",
            got=f"{type(report).__name__}",
            do="Pass what jaxmem.analyze or jaxmem.compare returned.",
        )
    points = frontier_points(report) if isinstance(report, Comparison) else []
    return rendered(
        "report.html.jinja",
        mode=mode,
        title=title,
        views=[report_view(row) for row in reports],
        comparison=comparison_view(reports) if mode == "comparison" else None,
        refused=report.refused if isinstance(report, Comparison) else (),
        diff=_diff_view(diff(*reports)) if mode == "diff" else None,
        frontier=len([point for point in points if point["peak_bytes"] is not None]) > 1,
        selected=len(reports) - 1 if mode == "diff" else 0,
        css=asset(*(f"{name}.css" for name in _STYLES)),
        scripts=[asset(f"js/{name}.js") for name in _SCRIPTS],
        plotly=_plotly(),
        data=_data(reports, mode, points),
    )


def write_html(
    path: str | os.PathLike, report: MemoryReport | Comparison, *, against: MemoryReport | None = None
) -> None:
    """Writes `html_report` to a file, in UTF-8."""
    Path(path).write_text(html_report(report, against=against), encoding="utf-8")


def _diff_view(changes: Diff) -> dict[str, Any]:
    before, after = changes.before, changes.after
    scale = max(before.peak_bytes or 0, after.peak_bytes or 0, 1)
    largest = max([abs(change.change_bytes) for change in changes.kinds] + [1])
    known = before.peak_bytes is not None and after.peak_bytes is not None
    return {
        "change": format_change((after.peak_bytes or 0) - (before.peak_bytes or 0)) if known else "unknown",
        "grew": (after.peak_bytes or 0) > (before.peak_bytes or 0),
        "bars": [segments(report, scale) for report in (before, after)],
        "settings": changes.settings,
        "kinds": changes.kinds,
        **{name: getattr(changes, name)[:_MOST_CHANGES] for name in _LISTED},
        "more": {name: max(0, len(getattr(changes, name)) - _MOST_CHANGES) for name in _LISTED},
        "code": _code(before, after),
        "largest": largest,
    }


def _code(*reports: MemoryReport) -> dict[str, str]:
    """What stands at "gpt.py:52" in the later of the reports that tell; nothing where two files have such a line."""
    code: dict[str, str] = {}
    for report in reports:
        called = {b.source_file: b.source.rpartition(":")[0] for b in report.buffers}  # a cell has two names
        names = [f"{called.get(line.file) or short_name(line.file)}:{line.line}" for line in report.source_lines]
        lines = zip(names, report.source_lines, strict=True)
        code |= {name: line.text for name, line in lines if names.count(name) == 1}
    return code


def _data(reports: list[MemoryReport], mode: str, points: list[dict[str, Any]]):
    """The JSON that the scripts read, safe inside a script element."""
    from markupsafe import Markup

    text = ""
    for share in (1, 2, 4, 8, 16, 64):  # long names may need fewer rows to stay within the size
        most = max(50, 8000 // len(reports) // share), max(400, 16000 // len(reports) // share)
        rows = [report_data(row, most_buffers=most[0], most_moments=most[1]) for row in reports]
        data = {"mode": mode, "kinds": KINDS, "buffers": buffer_fields(), "reports": rows, "frontier": points}
        text = json.dumps(data, ensure_ascii=False, separators=(",", ":"))
        if len(text) <= _MOST_DATA:
            break
    # "<" begins </script> and <!--; the two separators end a line in old JavaScript.
    for raw in "<>&\u2028\u2029":
        text = text.replace(raw, f"\\u{ord(raw):04x}")
    return Markup(text)


def rendered(template: str, **values) -> str:
    """A template of `assets/` with its values, every text escaped."""
    page = _environment().get_template(template).render(**values)
    return page.encode("utf-8", "replace").decode("utf-8")  # half a surrogate in a name has no UTF-8


@functools.cache
def _environment():
    import jinja2  # takes 0.2 s, which `jaxmem analyze` without a page should not pay

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("jaxmem.report", "assets"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(bytes=format_bytes, change=format_change, kind=label, kind_style=style)
    return environment


def asset(*names: str):
    """Style sheets or scripts of ours, to stand in the page as they are."""
    from markupsafe import Markup

    folder = importlib.resources.files("jaxmem.report") / "assets"
    return Markup("".join((folder / name).read_text(encoding="utf-8") for name in names))


@functools.cache
def _plotly():
    """Plotly's script, to be run as a module.

    The functions round it are removed; a module has a scope of its own. A browser parses a whole function before it
    runs it, and again for each error that plotly provokes to see what the browser can do, so that plotly would take
    twice as long to start. A script of another form is used as it is.
    """
    from markupsafe import Markup

    text = (importlib.resources.files("plotly") / "package_data" / "plotly.min.js").read_text(encoding="utf-8")
    found = _WRAPPED.search(text)
    if found:
        text = f"{text[: text.find('*/') + 2]}{found['body']}window.Plotly={found['made']};{found['notices']}"
    return Markup(text)
