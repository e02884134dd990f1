"""`jaxmem diff`: what grew and what shrank from one saved report to another."""

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Annotated

import typer

from jaxmem.cli._options import Debug, HtmlOut, JsonOut
from jaxmem.cli._output import Outputs, clean_stdout
from jaxmem.errors import InputError

if TYPE_CHECKING:
    from jaxmem.analysis import MemoryReport


def diff(
    before: Annotated[
        str, typer.Argument(metavar="A.json", help="A report that analyze --json wrote.", show_default=False)
    ],
    after: Annotated[str, typer.Argument(metavar="B.json", help="The one that is newer.", show_default=False)],
    json_out: JsonOut = None,
    html_out: HtmlOut = None,
    debug: Debug = False,
):
    """Show what grew and what shrank between two reports saved with analyze --json: kinds, layers, buffers."""
    from jaxmem.cli._environment import start_jax

    outputs = Outputs({"--json": json_out, "--html": html_out})
    outputs.check(inputs=(before, after))
    start_jax()  # nothing runs; the records' package imports it
    with clean_stdout(outputs.to_stdout) as stdout:
        reports = read_reports(before, after)
        from jaxmem.report import html_report
        from jaxmem.report.changes import render_diff
        from jaxmem.report.differences import diff as changes_between

        found = changes_between(*reports)
        results = {
            "--json": found.to_json,
            "--html": lambda: html_report(reports[1], against=reports[0]),
        }
        outputs.write(stdout, results)
    outputs.show(render_diff(found))


def read_reports(before: str, after: str) -> tuple["MemoryReport", "MemoryReport"]:
    """Both reports; where they are of one name, as two versions of a program are, their files tell them apart."""
    old, new = read_report(before), read_report(after)
    if os.path.samefile(before, after):
        raise InputError(
            wanted="two reports to compare",
            got=f"{before} twice" if before == after else f"{before} and {after}, which are one file",
            do="Name the older one first, then the newer one.",
        )
    if old.name == new.name:
        old, new = dataclasses.replace(old, name=before), dataclasses.replace(new, name=after)
    return old, new


def read_report(path: str) -> "MemoryReport":
    """The report in a JSON file.

    Raises:
      InputError: the file cannot be read, is no JSON, or holds no report of this version.
    """
    from jaxmem.analysis import MemoryReport, ReportReadError

    wanted, do = f"a report in {path}", "Write one with `jaxmem analyze FILE --json OUT`."
    try:
        with open(path, encoding="utf-8") as stream:
            values = json.load(stream)
    except OSError as error:
        raise InputError(wanted=wanted, got=error.strerror or str(error), do=do) from None
    except RecursionError:
        raise InputError(wanted=wanted, got="JSON that is nested too deeply", do=do) from None
    except ValueError as error:  # no UTF-8, no JSON, or a NUL in the path
        raise InputError(wanted=wanted, got=f"no JSON: {error}", do=do) from None
    try:
        return MemoryReport.from_dict(values)
    except ReportReadError as error:
        raise ReportReadError(wanted=f"in {path} {error.wanted}", got=error.got, do=error.do) from None
