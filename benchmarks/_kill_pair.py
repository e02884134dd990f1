"""Two processes that save together, of which one is killed: what both had completed is there for the next two."""

import functools
import hashlib
import random
import socket
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._forked import Forked
from benchmarks._kill_chain import complete
from jaxmem.checkpoint import Manager

WINDOWS, KEEP, PROCESSES = 12, 2, 2


def train(tell, folder: str) -> None:
    """Each window changes an array that is sharded over both processes, and is saved; tells this process's shards."""
    mesh = jax.make_mesh((4,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows, whole = jax.NamedSharding(mesh, jax.P("x")), jax.NamedSharding(mesh, jax.P())
    shardings = {"w": rows, "key": whole}
    init = jax.jit(lambda: {"w": jnp.arange(2.0**14), "key": jax.random.key(0)}, out_shardings=shardings)

    @functools.partial(jax.jit, out_shardings=shardings)
    def step(state):
        key, now = jax.random.split(state["key"])
        return {"w": state["w"] * 1.01 + jax.random.normal(now, state["w"].shape), "key": key}

    state = init()
    tell("begins")
    with Manager(folder, keep=KEEP) as manager:
        found = manager.latest()
        if found is not None:
            state = manager.restore(state, found)
        for window in range(found.number if found else 0, WINDOWS):
            tell("window", window)
            state = step(state)
            manager.save(state, number=window + 1)
    said = hashlib.sha256(np.asarray(jax.random.key_data(state["key"])).tobytes())
    for shard in state["w"].addressable_shards:
        said.update(np.asarray(shard.data).tobytes())
    tell("ends", said.hexdigest())
    jax.distributed.shutdown()  # waits for the other, which would not outlive the coordinator


def _prepare(port: int, process: int) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process)


def _pair(folder: Path, victim: int | None = None, die_at: tuple[int, float] | None = None) -> list[Forked]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [
        Forked(
            train,
            str(folder),
            prepare=functools.partial(_prepare, port, process),
            watched=folder,
            die_at=die_at if process == victim else None,
        )
        for process in range(PROCESSES)
    ]


def _to_the_end(folder: Path) -> tuple[list[str], list[Forked]]:
    """What each of two processes ends with, or says where one fails."""
    pair = _pair(folder)
    ended = [process.end() for process in pair]
    wrong = [process.output()[-1000:] for process, how in zip(pair, ended, strict=True) if how != "ended"]
    if wrong:
        return wrong, pair
    return [process.value("ends") for process in pair], pair


def pairs(folder: Path, count: int, seed: int) -> list[tuple[str, list[str]]]:
    """(name, what is wrong) of so many pairs, of which one process is killed, at a file operation or after a time."""
    known, first = _to_the_end(folder / "known")
    if any(process.value("ends") is None for process in first):
        raise RuntimeError(f"an unhindered pair fails: {known}")
    operations, begins = first[0].events[-1].operations, first[0].all("window")[0].seconds
    seconds = first[0].events[-1].seconds - begins
    found = []
    for number in range(count):
        draw, path = random.Random(seed + number), folder / str(number)
        victim = number % PROCESSES
        moment = (draw.randint(operations // WINDOWS, operations), 0.0), draw.uniform(0.05, 1) * seconds
        pair = _pair(path, victim, moment[0] if victim == 0 else None)
        pair[victim].until("window", 120)
        ended = pair[victim].end(kill_after=None if victim == 0 else moment[1])
        pair[1 - victim].end(kill_after=0.5)  # as the scheduler of a cluster does
        how = f"at file operation {moment[0][0]}" if victim == 0 else f"after {moment[1]:.3f} s"
        wrong = [] if ended in ("killed", "ended") else [f"the process {ended}: {pair[victim].output()[-500:]}"]
        before = complete(path)
        newest, window = max(before, default=0), min(process.value("window", 0) for process in pair)
        if newest < window - 1:
            wrong.append(f"in window {window} the newest complete is {newest}")
        ends, again = _to_the_end(path)
        if ends != known:
            wrong.append(f"the next pair ends otherwise: {ends}")
        begun = {process.all("window")[0].value for process in again if process.all("window")}
        if begun and begun != {newest}:
            wrong.append(f"the next pair began at {begun}, and complete were {sorted(before)}")
        rest = {each.name for each in path.iterdir()} - {".jaxmem.lock"}
        if not wrong and rest != {str(WINDOWS - 1), str(WINDOWS)}:
            wrong.append(f"in the end there are {sorted(rest)}")
        found.append((f"process {victim} {ended} {how}", wrong))
    return found
