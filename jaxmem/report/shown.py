"""What `str`, `show`, `save` and a notebook make of each record: the one table of forms, and the functions that use it.

Records stand below the renderers and reach these by `_display.renderers()`.
"""

import dataclasses
import functools
import importlib
import io
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console

from jaxmem._cell import in_notebook
from jaxmem.analysis import Comparison, MemoryReport
from jaxmem.analysis.oom import OomBuffer, OomExplanation
from jaxmem.errors import InputError
from jaxmem.remat import Examination, Frontier, FrontierPoint, Residual, ResidualTable, Solution, SolvedValue
from jaxmem.report import notebook
from jaxmem.report._from_rich import as_html
from jaxmem.report.changes import render_diff
from jaxmem.report.differences import Diff
from jaxmem.report.exports import buffers_csv, comparison_csv, diff_csv, records_csv
from jaxmem.report.frontier import frontier_figure as frontier_figure
from jaxmem.report.frontier import render_frontier
from jaxmem.report.html import html_report
from jaxmem.report.oom import render_oom
from jaxmem.report.residuals import render_residuals, render_solution
from jaxmem.report.terminal import render_comparison, render_report
from jaxmem.report.verification import render_equivalence, render_examination, render_verification
from jaxmem.report.workload import render_workload
from jaxmem.train import Check, Equivalence, LeafDifference, Verification
from jaxmem.workload import Workload

WIDTH = 100
"""Columns of a text where no terminal tells how wide it is."""
FORMATS = (".html", ".json", ".csv")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Form:
    """How one kind of record looks.

    Args:
      draw: record → what rich prints.
      body: record → what a notebook shows; where there is none, made of what rich prints.
      page: record → a whole page; where there is none, the notebook's piece as a page.
      csv: record → its rows, for other programs.
    """

    draw: Callable[[Any], Any]
    body: Callable[[Any], str] | None = None
    page: Callable[[Any], str] | None = None
    csv: Callable[[Any], str] | None = None


def text(record: Any) -> str:
    """What a terminal shows of a record, without colour: as wide as the terminal, else `WIDTH` columns."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    out = io.StringIO()
    Console(file=out, width=width, color_system=None, force_terminal=False, force_jupyter=False).print(
        _form(record).draw(record)
    )
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()).strip("\n")


def show(record: Any) -> None:
    """Displays a record in a notebook, or prints it with colours."""
    if in_notebook():
        display = importlib.import_module("IPython.display").display  # there, since this is a notebook

        display(record)
    else:
        Console().print(_form(record).draw(record))


def report_fragment(record: Any) -> str:
    """A piece of HTML for a notebook, with its own styles and without scripts."""
    form = _form(record)
    return notebook.wrapped(form.body(record) if form.body else as_html(form.draw(record)))


def save(record: Any, path: str | os.PathLike) -> None:
    """Writes a record in the format that the file's ending names."""
    form, kind = _form(record), type(record).__name__
    makers: dict[str, Callable[[], str]] = {".html": lambda: (form.page or _page)(record)}
    if hasattr(record, "to_json"):
        makers[".json"] = lambda: record.to_json() + "\n"
    if form.csv is not None:
        makers[".csv"] = functools.partial(form.csv, record)
    ending = Path(path).suffix.lower()
    if ending not in makers:
        known = " or ".join(ending for ending in FORMATS if ending in makers)
        raise InputError(
            wanted=f"a file that ends in {known}, the formats of a {kind}",
            got=repr(os.fspath(path)),
            do=f"Write for example .save({Path(path).stem + next(iter(makers))!r}).",
        )
    text = makers[ending]()
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            wanted=f"a file to write a {kind} to",
            got=f"{os.fspath(path)!r} ({error.strerror})",
            do="Name one in a folder that is there, and that may be written to.",
        ) from error


def _form(record: Any) -> Form:
    return next(FORMS[cls] for cls in type(record).__mro__ if cls in FORMS)


def _page(record: Any) -> str:
    return notebook.page_of(repr(record), report_fragment(record))


FORMS: dict[type, Form] = {
    MemoryReport: Form(draw=render_report, body=notebook.report_body, page=html_report, csv=buffers_csv),
    Comparison: Form(draw=render_comparison, body=notebook.comparison_body, page=html_report, csv=comparison_csv),
    Diff: Form(
        draw=render_diff,
        body=notebook.diff_body,
        page=lambda found: html_report(found.after, against=found.before),
        csv=diff_csv,
    ),
    ResidualTable: Form(draw=render_residuals, csv=lambda table: records_csv(Residual, table.rows)),
    Solution: Form(draw=render_solution, csv=lambda solution: records_csv(SolvedValue, solution.values)),
    Frontier: Form(
        draw=render_frontier,
        body=notebook.frontier_body,
        csv=lambda curve: records_csv(FrontierPoint, (*curve.points, *curve.policies)),
    ),
    Examination: Form(draw=render_examination, csv=lambda found: records_csv(Residual, found.residuals.rows)),
    Verification: Form(draw=render_verification, csv=lambda f: records_csv(Check, f.checks)),
    Equivalence: Form(draw=render_equivalence, csv=lambda found: records_csv(LeafDifference, found)),
    OomExplanation: Form(draw=render_oom, csv=lambda said: records_csv(OomBuffer, said.buffers)),
    Workload: Form(draw=render_workload),
}
