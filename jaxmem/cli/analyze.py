"""`jaxmem analyze`: where the bytes of one training step go."""

import dataclasses
import json
import shlex
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from jaxmem._status import stages
from jaxmem.cli._errors import DOES_NOT_FIT
from jaxmem.cli._fields import NONE_GIVEN, Fields, sets_fields
from jaxmem.cli._options import Debug, File, HtmlOut, JsonOut, Settings, Target
from jaxmem.cli._output import Outputs, clean_stdout

if TYPE_CHECKING:
    from jaxmem.analysis import MemoryReport

# Cures are compiled without being asked for where a compile took at most so long, and no other is begun after so many
# times what the analysis took.
_CHEAP_SECONDS, _AGAIN, _MOST_SECONDS = 5.0, 2.0, 10.0


def with_options(report: "MemoryReport", settings: Sequence[str]) -> "MemoryReport":
    """A report that tells the options that its file was given, NAME=VALUE each."""
    from jaxmem.analysis import Setting

    pairs = [text.partition("=") for text in settings]
    told = tuple(Setting(name=f"--set {name.strip()}", value=value.strip()) for name, _, value in pairs)
    return dataclasses.replace(report, settings=(*report.settings, *told))


def is_cheap(report: "MemoryReport") -> bool:
    """Whether its cures are compiled without being asked for: for a CPU or GPU, in seconds."""
    seconds = report.compile_seconds
    return report.backend in ("cpu", "gpu") and seconds is not None and seconds <= _CHEAP_SECONDS


@sets_fields()
def analyze(
    file: File,
    target: Target = None,
    settings: Settings = None,
    fields: Fields = NONE_GIVEN,
    json_out: JsonOut = None,
    html_out: HtmlOut = None,
    csv_out: Annotated[
        str | None, typer.Option("--csv", metavar="OUT", help="Write the buffers at the peak, a line a buffer.")
    ] = None,
    trace_out: Annotated[
        str | None,
        typer.Option("--trace", metavar="OUT", help="Write the timeline as a Chrome trace, for ui.perfetto.dev."),
    ] = None,
    cures: Annotated[
        bool,
        typer.Option(
            "--cures",
            help="Also compile all that the findings advise, each by itself, and list its bytes and its time. For a "
            "CPU or GPU what can be compiled in seconds is compiled anyway.",
        ),
    ] = False,
    debug: Debug = False,
):
    """Compile one training step and say what it needs, without running it."""
    from jaxmem.cli._environment import start_jax

    outputs = Outputs({"--json": json_out, "--html": html_out, "--csv": csv_out, "--trace": trace_out})
    outputs.check(inputs=(file, fields.path))
    start_jax()
    from jaxmem.analysis._cures import in_shell
    from jaxmem.cli._load import load_workload
    from jaxmem.targets import resolve_target
    from jaxmem.train import analyze as analyze_workload
    from jaxmem.train import cured, try_cures

    resolve_target(target)  # an unknown name is said before the file runs
    chosen = fields.config()
    with clean_stdout(outputs.to_stdout) as stdout:
        with stages(f"loading {file}") as stage:
            workload = load_workload(file, target=target, settings=settings or ())
            stage("tracing and compiling")
            start = time.perf_counter()
            report = with_options(analyze_workload(workload, chosen, target=target), settings or ())
            took = time.perf_counter() - start
            pairs = [*fields.given(), *(("--set", setting) for setting in settings or ())]
            options = [(option, shlex.quote(value)) for option, value in pairs]
            tried = None
            if cures or is_cheap(report):
                told = lambda row, what: stage(f"{what} {row}")  # noqa: E731
                most = None if cures else min(_MOST_SECONDS, _AGAIN * took)
                tried = try_cures(workload, chosen, target=target, report=report, progress=told, within_seconds=most)
                report = cured(report, tried)
            report = dataclasses.replace(report, findings=in_shell(report.findings, shlex.quote(file), options))
            stage("writing")
        from jaxmem.report import buffers_csv, chrome_trace, html_report, render_comparison, render_report

        results = {
            "--json": report.to_json,
            "--html": lambda: html_report(report),
            "--csv": lambda: buffers_csv(report),
            "--trace": lambda: json.dumps(chrome_trace(report)),
        }
        outputs.write(stdout, results)
    outputs.show(
        render_report(report), *(["\nwhat the cures come to", render_comparison(tried)] if tried and cures else [])
    )
    if report.fits == "no":
        raise typer.Exit(DOES_NOT_FIT)
