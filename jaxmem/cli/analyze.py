"""`jaxmem analyze`: where the bytes of one training step go."""

import json
from typing import Annotated

import typer

from jaxmem._status import stages
from jaxmem.cli._errors import DOES_NOT_FIT
from jaxmem.cli._options import (
    AccumulationSteps,
    ConfigFile,
    Debug,
    File,
    HtmlOut,
    JsonOut,
    PrecisionName,
    Remat,
    Settings,
    Target,
    build_config,
)
from jaxmem.cli._output import Outputs, clean_stdout


def analyze(
    file: File,
    target: Target = None,
    config: ConfigFile = None,
    settings: Settings = None,
    accumulation_steps: AccumulationSteps = None,
    precision: PrecisionName = None,
    remat: Remat = None,
    json_out: JsonOut = None,
    html_out: HtmlOut = None,
    csv_out: Annotated[
        str | None, typer.Option("--csv", metavar="OUT", help="Write the buffers at the peak, a line a buffer.")
    ] = None,
    trace_out: Annotated[
        str | None,
        typer.Option("--trace", metavar="OUT", help="Write the timeline as a Chrome trace, for ui.perfetto.dev."),
    ] = None,
    debug: Debug = False,
):
    """Compile one training step and say what it needs, without running it."""
    from jaxmem.cli._environment import start_jax

    outputs = Outputs({"--json": json_out, "--html": html_out, "--csv": csv_out, "--trace": trace_out})
    outputs.check(inputs=(file, config))
    start_jax()
    from jaxmem.cli._load import load_workload
    from jaxmem.targets import resolve_target
    from jaxmem.train import analyze as analyze_workload

    resolve_target(target)  # an unknown name is said before the file runs
    chosen = build_config(config, accumulation_steps=accumulation_steps, precision=precision, remat=remat)
    with clean_stdout(outputs.to_stdout) as stdout:
        with stages(f"loading {file}") as stage:
            workload = load_workload(file, target=target, settings=settings or ())
            stage("tracing and compiling")
            report = analyze_workload(workload, chosen, target=target)
            stage("writing")
        from jaxmem.report import buffers_csv, chrome_trace, html_report, render_report

        results = {
            "--json": report.to_json,
            "--html": lambda: html_report(report),
            "--csv": lambda: buffers_csv(report),
            "--trace": lambda: json.dumps(chrome_trace(report)),
        }
        outputs.write(stdout, results)
    outputs.show(render_report(report))
    if report.fits == "no":
        raise typer.Exit(DOES_NOT_FIT)
