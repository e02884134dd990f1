"""`jaxmem train`: run the training step on the workload's data."""

import sys
from typing import Annotated

import typer

from jaxmem._status import stages
from jaxmem.cli._errors import INTERRUPTED
from jaxmem.cli._options import (
    AccumulationSteps,
    ConfigFile,
    Debug,
    File,
    PrecisionName,
    Remat,
    Settings,
    build_config,
)
from jaxmem.cli._output import STDOUT, OutputError, Outputs


def train(
    file: File,
    steps: Annotated[
        int, typer.Option("--steps", metavar="N", min=1, help="Optimizer steps to take.", show_default=False)
    ],
    config: ConfigFile = None,
    settings: Settings = None,
    accumulation_steps: AccumulationSteps = None,
    precision: PrecisionName = None,
    remat: Remat = None,
    metrics: Annotated[
        str | None, typer.Option("--metrics", metavar="OUT.jsonl", help="Write metrics as JSON lines.")
    ] = None,
    log_every: Annotated[int, typer.Option("--log-every", metavar="N", min=1, help="Steps between readings.")] = 10,
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            min=-(2**63),
            max=2**63 - 1,
            help="Seed of parameters and dropout; the workload's own key if not given.",
        ),
    ] = None,
    debug: Debug = False,
):
    """Train on this machine. Ctrl-C finishes the current step and stops cleanly."""
    from jaxmem.cli._environment import start_jax

    if metrics == STDOUT:
        raise OutputError(wanted="--metrics to name a file", got="-", do="Metrics are not written to stdout.")
    Outputs({"--metrics": metrics}).check(inputs=(file, config))
    start_jax()
    import jax

    from jaxmem.cli._load import load_workload
    from jaxmem.train import make_train_step
    from jaxmem.train._loop import run_loop

    chosen = build_config(config, accumulation_steps=accumulation_steps, precision=precision, remat=remat)
    with stages(f"loading {file}") as stage:
        workload = load_workload(file, settings=settings or ())
        data = training_data(workload)
        step = make_train_step(workload, chosen)
        stage("initialising")
        state = step.init(None if seed is None else jax.random.key(seed))
    result = run_loop(step, state, data, steps, log_every=log_every, metrics_path=metrics, line_seconds=0)
    print(summary(result, steps))
    if result.stopped == "interrupted":
        raise typer.Exit(INTERRUPTED)


def training_data(workload):
    """The workload's data; its example batch over and over, with a word on stderr, where that is all there is."""
    import jax

    from jaxmem.errors import WorkloadError

    if workload.data is not None:
        return workload.data
    leaves = jax.tree.leaves(workload.batch)
    if not leaves or any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):
        raise WorkloadError(
            wanted="a workload with data to train on",
            got="data=None, and an example batch of shapes only" if leaves else "data=None, and an empty example batch",
            do="Pass Workload(..., data=an iterable of batches, or a function window_index -> batch).",
        )
    print("jaxmem: the workload has no data: training on its example batch over and over", file=sys.stderr)
    return lambda window: workload.batch


def summary(result, asked: int) -> str:
    """One sentence on how training ended."""
    last = result.metrics
    text = f"{result.windows} of {asked} steps, loss {last['loss']:.6g} after step {last['step']}"
    if "loss_scale" in last and last["skipped"]:
        text = f"{text}, {last['skipped']:g} skipped (gradients not finite)"
    text = f"{text}, {last['seconds']:.1f} s"
    return text if result.stopped == "done" else f"{text}; {result.stopped}"
