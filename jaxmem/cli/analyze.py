"""`jaxmem analyze`: where the bytes of one training step go."""

import typer

from jaxmem.cli._errors import DOES_NOT_FIT
from jaxmem.cli._options import (
    AccumulationSteps,
    ConfigFile,
    Debug,
    File,
    JsonOut,
    PrecisionName,
    Remat,
    Settings,
    Target,
    build_config,
)
from jaxmem.cli._output import STDOUT, check_writable, clean_stdout, write_json
from jaxmem.cli._status import stages


def analyze(
    file: File,
    target: Target = None,
    config: ConfigFile = None,
    settings: Settings = None,
    accumulation_steps: AccumulationSteps = None,
    precision: PrecisionName = None,
    remat: Remat = None,
    json_out: JsonOut = None,
    debug: Debug = False,
):
    """Compile one training step and say what it needs, without running it."""
    from jaxmem.cli._environment import start_jax

    check_writable(json_out, "--json")
    start_jax()
    import jaxmem
    from jaxmem.cli._load import load_workload
    from jaxmem.targets import resolve_target

    resolve_target(target)  # an unknown name is said before the file runs
    chosen = build_config(config, accumulation_steps=accumulation_steps, precision=precision, remat=remat)
    with clean_stdout(json_out == STDOUT) as stdout:
        with stages(f"loading {file}") as stage:
            workload = load_workload(file, target=target, settings=settings or ())
            stage("tracing and compiling")
            report = jaxmem.analyze(workload, chosen, target=target)
        if json_out is not None:
            write_json(json_out, report.to_json(), stdout)
    if json_out != STDOUT:
        from rich.console import Console

        from jaxmem.report import render_report

        Console().print(render_report(report))
    if report.fits == "no":
        raise typer.Exit(DOES_NOT_FIT)
