"""`jaxmem train`: run the training step on the workload's data."""

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from jaxmem._status import stages
from jaxmem.cli._environment import start_jax
from jaxmem.cli._errors import INTERRUPTED, TERMINATED
from jaxmem.cli._fields import NONE_GIVEN, Fields, sets_fields
from jaxmem.cli._hosts import Coordinator, NumProcesses, ProcessId, agree_on_command, joined, say_where
from jaxmem.cli._options import Debug, File, Settings
from jaxmem.cli._output import STDOUT, OutputError, Outputs
from jaxmem.errors import InputError

STOPS = {"interrupted": INTERRUPTED, "terminated": TERMINATED}


@sets_fields()
def train(
    file: File,
    steps: Annotated[
        int,
        typer.Option(
            "--steps",
            metavar="N",
            min=1,
            help="Optimizer steps to take; with --checkpoint-dir in all, runs before this one included.",
            show_default=False,
        ),
    ],
    settings: Settings = None,
    fields: Fields = NONE_GIVEN,
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
    checkpoint_dir: Annotated[
        str | None,
        typer.Option(
            "--checkpoint-dir",
            metavar="D",
            help="Save checkpoints in this folder, and go on from the newest good one that is there.",
        ),
    ] = None,
    save_every: Annotated[
        int | None,
        typer.Option("--save-every", metavar="N", min=1, help="Steps between two checkpoints.", show_default="100"),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option("--keep", metavar="N", min=1, help="How many checkpoints to keep.", show_default="3"),
    ] = None,
    cast: Annotated[
        str | None,
        typer.Option(
            "--cast",
            metavar="PATTERN",
            help="Arrays that may be restored in another dtype than they were saved in, such as opt_state; several "
            "separated by commas.",
        ),
    ] = None,
    coordinator: Coordinator = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    debug: Debug = False,
):
    """Train on this machine, or on several. Ctrl-C or SIGTERM finishes the current step, saves, and stops cleanly."""
    if metrics == STDOUT:
        raise OutputError(wanted="--metrics to name a file", got="-", do="Metrics are not written to stdout.")
    _need_folder(checkpoint_dir, {"--save-every": save_every, "--keep": keep, "--cast": cast})
    _keep_apart(metrics, checkpoint_dir)
    Outputs({"--metrics": metrics}).check(inputs=(file, fields.path))
    with joined(coordinator, num_processes, process_id):
        start_jax()
        import jax

        same = {"--steps": steps, "--seed": seed, "--log-every": log_every, "--save-every": save_every, "--cast": cast}
        agree_on_command(file, {**same, "--set": settings, "--checkpoint-dir": checkpoint_dir})
        from jaxmem._processes import say
        from jaxmem.cli._load import load_workload
        from jaxmem.train._loop import SAVE_EVERY, run_loop
        from jaxmem.train._loop_checkpoint import manager_of, newest_record
        from jaxmem.train._record import resumed_step

        key = None if seed is None else jax.random.key(seed)

        chosen = fields.config()
        with stages(f"loading {file}"):
            workload = load_workload(file, settings=settings or ())
            data = training_data(workload)
            # Before the step is compiled under a budget: a folder that cannot be used is said now.
            manager = None if checkpoint_dir is None else manager_of(checkpoint_dir, **({"keep": keep} if keep else {}))
            step = resumed_step({} if manager is None else newest_record(manager), workload, chosen)
        say_where(step, checkpoint_dir)
        with manager or contextlib.nullcontext():
            result = run_loop(
                step,
                lambda: step.init(key),
                data,
                steps,
                checkpoint=manager,
                save_every=save_every or SAVE_EVERY,
                cast=cast.split(",") if cast else (),
                log_every=log_every,
                metrics_path=metrics,
                line_seconds=0,
            )
        if key is not None and _key_data(key) != _key_data(result.state.rng):
            say(f"--seed {seed} did nothing: the run in {checkpoint_dir} began with another key")
        if jax.process_index() == 0:
            print(summary(result, steps), flush=True)
        if result.stopped in STOPS:
            raise typer.Exit(STOPS[result.stopped])


def _need_folder(checkpoint_dir: str | None, options) -> None:
    given = [option for option, value in options.items() if value is not None]
    if given and checkpoint_dir is None:
        raise InputError(wanted=f"--checkpoint-dir with {given[0]}", got="none", do="Name the folder for checkpoints.")


def _key_data(key) -> list[int]:
    import jax
    import numpy as np

    return np.asarray(jax.random.key_data(key)).tolist()


def _keep_apart(metrics: str | None, checkpoint_dir: str | None) -> None:
    """OutputError for metrics that would be written into a checkpoint, or into the lock of the folder."""
    if metrics is None or checkpoint_dir is None:
        return
    path, folder = Path(metrics).resolve(), Path(checkpoint_dir).resolve()
    if folder in path.parents and (path.parent != folder or path.name.startswith(".")):
        raise OutputError(
            wanted="--metrics to name a file of its own",
            got=f"{metrics}, which is a checkpoint's",
            do=f"Name for example {Path(checkpoint_dir) / 'metrics.jsonl'}.",
        )


def training_data(workload):
    """The workload's data; its example batch over and over, with a word on stderr, where that is all there is."""
    import jax

    from jaxmem._processes import say
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
    say("the workload has no data: training on its example batch over and over")
    return lambda window: workload.batch


def summary(result, asked: int) -> str:
    """How training ended, and where what was saved is."""
    last, before = result.metrics, result.window - result.windows
    if result.checkpoint is None or not before:
        text = f"{result.windows} of {asked} steps"
    elif result.window >= asked and not result.windows:
        text = f"nothing to do: {result.window} steps were trained before, of {asked}"
    else:
        text = f"{result.window} of {asked} steps, {result.windows} of them now"
    if last:
        text = f"{text}, loss {last['loss']:.6g} after step {last['step']}"
        if "loss_scale" in last and last["skipped"]:
            text = f"{text}, {last['skipped']:g} skipped (gradients not finite)"
        text = f"{text}, {last['seconds']:.1f} s"
    text = text if result.stopped == "done" else f"{text}; {result.stopped}"
    if result.checkpoint is None:
        return text
    again = "; the same command goes on from there" if result.window < asked else ""
    return f"{text}\nsaved in {result.checkpoint.path}{again}"
