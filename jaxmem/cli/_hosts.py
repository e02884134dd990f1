"""Training on several hosts: the options, how processes join, and how all of them end together."""

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated

import typer

from jaxmem.cli._environment import applied_defaults, import_jax, quiet_collectives
from jaxmem.cli._errors import DOES_NOT_FIT, INTERNAL, explain
from jaxmem.cli._rendezvous import meet
from jaxmem.errors import ProcessError

AUTO = "auto"
# JAX's coordinator starts when all processes are there.
_START_SECONDS = 60
# Of JAX's settings those by which one program is traced to another, or one key draws other numbers.
_SAME = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)

Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        help="Train in several processes, one a host; this is process 0's host, and a free port there. 'auto' on TPU "
        "pods, under SLURM and Open MPI, where JAX knows all three.",
        show_default=False,
    ),
]
NumProcesses = Annotated[
    int | None, typer.Option("--num-processes", metavar="N", min=1, help="How many there are.", show_default=False)
]
ProcessId = Annotated[
    int | None,
    typer.Option("--process-id", metavar="I", min=0, help="Which one this is, from 0 on.", show_default=False),
]


def check_options(coordinator: str | None, num_processes: int | None, process_id: int | None) -> None:
    """ProcessError for options of several processes that do not belong together."""
    given = {"--coordinator": coordinator, "--num-processes": num_processes, "--process-id": process_id}
    there = [name for name, value in given.items() if value is not None]
    if coordinator == AUTO:
        if len(there) > 1:
            raise ProcessError(wanted="--coordinator auto alone", got=f"{there[1]} besides", do="Leave it out.")
        return
    if there and len(there) < 3:
        missing = ", ".join(name for name in given if name not in there)
        raise ProcessError(
            wanted="--coordinator, --num-processes and --process-id together",
            got=f"{' and '.join(there)} without {missing}",
            do="Give all three, or --coordinator auto on a TPU pod, under SLURM or Open MPI; none for one process.",
        )
    if not there:
        return
    assert coordinator is not None and num_processes is not None and process_id is not None
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ProcessError(
            wanted="--coordinator HOST:PORT, a port from 1 to 65535",
            got=repr(coordinator),
            do="For example 10.0.0.1:1234.",
        )
    if process_id >= num_processes:
        raise ProcessError(
            wanted=f"--process-id from 0 to {num_processes - 1}, as there are {num_processes} processes",
            got=str(process_id),
            do="Count them from 0 on.",
        )


@contextlib.contextmanager
def joined(coordinator: str | None, num_processes: int | None, process_id: int | None) -> Iterator[None]:
    """Within it JAX knows the devices of all processes; where one fails, all end, and say why.

    Without a coordinator nothing happens. JAX must not have been imported.
    """
    check_options(coordinator, num_processes, process_id)
    if coordinator is None:
        yield
        return
    if applied_defaults().get("TF_CPP_MIN_LOG_LEVEL"):
        # One higher than for one process: XLA's last word, a stack trace of C++, is said in a paragraph, see `Peers`.
        os.environ["TF_CPP_MIN_LOG_LEVEL"] = "4"
    _initialize(coordinator, num_processes, process_id)
    from jaxmem._peers import Failure, peers

    watch = peers()
    if watch is None:
        yield
        return
    watch.is_reported = True
    try:
        _agree_on_jax()
        with quiet_collectives():
            _connect()
        yield
    except typer.Exit:
        watch.end()
        raise
    except BaseException as error:
        if "--debug" in sys.argv:
            traceback.print_exception(error)
        problem = explain(error)
        by_jax = _is_of_jax(error) and problem.exit_code != DOES_NOT_FIT
        watch.fail(Failure(text=problem.text, code=problem.exit_code), told_by_jax=by_jax)
        raise
    watch.end()


def _agree_on_jax() -> None:
    """ProcessError unless all processes set JAX alike: with other settings their programs are others."""
    import jax

    from jaxmem._processes import check_same

    check_same({name: str(getattr(jax.config, name)) for name in _SAME}, do="Set JAX alike in all of them.")


def agree_on_command(file: str, options: Mapping[str, object]) -> None:
    """ProcessError unless all processes train the same file with the same options."""
    from jaxmem._processes import check_same

    path = file if os.path.isfile(file) else file.rpartition(":")[0]
    things = {name: str(value) for name, value in options.items()}
    with contextlib.suppress(OSError, UnicodeDecodeError):  # what is wrong with it is said where it is loaded
        things[f"the text of {os.path.basename(path)}"] = Path(path).read_text("utf-8")
    check_same({"FILE": os.path.basename(file), **things}, do="Run the same command everywhere but for --process-id.")


def say_where(step, checkpoint_dir: str | None) -> None:
    """Says on which mesh several processes train, and what to do if one of them is lost."""
    import jax

    from jaxmem._peers import peers
    from jaxmem._processes import say

    watch = peers()
    if watch is None:
        return
    if checkpoint_dir is not None:
        watch.last_words = _hope(checkpoint_dir)
    axes = ", ".join(f"{name} {size}" for name, size in step.spec.layout.mesh.shape.items())
    rows = "its own rows" if step.workload.per_process_data else "the whole batch"
    say(f"{watch.count} processes with {jax.device_count()} devices, mesh: {axes}; each gives {rows}")


def _hope(folder: str) -> Callable[[], str]:
    """What tells what happens if all processes are started once more."""
    from jaxmem.checkpoint import _folder

    path = Path(folder)

    def say() -> str:
        complete = [number for number in _folder.numbers(path) if _folder.has_manifest(path / str(number))]
        at = f"resumes from window {max(complete)} of {folder}" if complete else "begins anew"
        return f"Start all processes with the same command: training {at}."

    return say


def _initialize(coordinator: str, num_processes: int | None, process_id: int | None) -> None:
    auto = coordinator == AUTO
    jax = import_jax()  # takes seconds, in which a process that the others have met could be lost unseen
    if not auto:
        assert num_processes is not None and process_id is not None
        host, _, port = coordinator.rpartition(":")
        meet(host.strip("[]"), int(port), num_processes, process_id)
    # With it SIGTERM would do nothing: C++ catches it, for a protocol that a loop has to take part in.
    jax.config.update("jax_enable_preemption_service", False)
    from jaxmem._compat import on_abort  # needs JAX

    on_abort(_alone)  # JAX aborts this process where the others do not come
    try:
        if auto:
            jax.distributed.initialize()
        else:
            jax.distributed.initialize(coordinator, num_processes, process_id, initialization_timeout=_START_SECONDS)
    except (ValueError, RuntimeError) as error:
        raise ProcessError(
            wanted="JAX to know this cluster" if auto else f"JAX's coordinator to start at {coordinator}",
            got=" ".join(str(error).split())[:300].rstrip("."),
            do="Give --coordinator HOST:PORT, --num-processes and --process-id."
            if auto
            else "Choose another port, or look at the output of process 0.",
        ) from error


def _alone() -> None:
    """Says that JAX's coordinator did not start, and exits"""
    text = (
        "jaxmem: JAX's coordinator did not start: another process ended after all were there, or cannot reach process "
        "0 any more. Look at what the others said, and start all processes again with the same command.\n"
    )
    os.write(2, text.encode())
    os._exit(INTERNAL)


def _connect() -> None:
    """First sums over all devices, those of one place in each process, and those of a process: here they connect."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()).reshape(jax.process_count(), -1), ("processes", "local_devices"))
    for axes in (("processes", "local_devices"), "processes", "local_devices"):
        sharded, whole = NamedSharding(mesh, PartitionSpec(axes)), NamedSharding(mesh, PartitionSpec())
        ones = jax.jit(lambda: jnp.ones(mesh.size), out_shardings=sharded)()
        jax.block_until_ready(jax.jit(lambda x: x, out_shardings=whole)(ones))
        jax.block_until_ready(jax.jit(jnp.sum, out_shardings=whole)(ones))


def _is_of_jax(error: BaseException) -> bool:
    """Whether JAX's runtime raised it: then another process may have gone before."""
    import jax

    return isinstance(error, jax.errors.JaxRuntimeError)
