"""The training runs that `benchmarks.kill` kills: four kinds, tiny, through the public API only.

Nothing here starts a backend when it is imported, so that a process that forks may import it.
"""

import functools
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
from benchmarks._damage import complaints, damages
from jaxmem.accumulate import multi_steps
from jaxmem.checkpoint import Manager, restore, save
from jaxmem.errors import JaxmemError
from jaxmem.loss_scale import DynamicLossScale
from jaxmem.train import train_loop

WINDOWS, KEEP, WIDTH, ROWS = 24, 2, 192, 16
KINDS = ("adam", "fp16", "multi_steps", "sharded")
Tell = Callable[..., None]


def data(window: int):
    """The batch of a window."""
    rng = np.random.default_rng(window)
    return {"x": rng.standard_normal((ROWS, WIDTH), np.float32), "y": rng.standard_normal(ROWS, np.float32)}


def _loss(params, batch, *, rng):
    x = batch["x"].astype(params["in"]["kernel"].dtype)
    hidden = jnp.tanh(x @ params["in"]["kernel"] + params["in"]["bias"])
    hidden = jnp.where(jax.random.bernoulli(rng, 0.9, hidden.shape), hidden / 0.9, 0)
    return jnp.mean(((hidden @ params["out"])[:, 0] - batch["y"].astype(hidden.dtype)) ** 2)


@functools.cache
def step_of(kind: str):
    """The step of a kind of run: a `TrainStep`."""
    rng = np.random.default_rng(0)
    normal = functools.partial(rng.standard_normal, dtype=np.float32)
    params = {"in": {"kernel": normal((WIDTH, WIDTH)) / 14, "bias": np.zeros(WIDTH, "f4")}, "out": normal((WIDTH, 1))}
    batch, config, optimizer = data(0), jaxmem.MemoryConfig(), optax.adam(optax.cosine_decay_schedule(1e-2, 100))
    if kind == "sharded":
        mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        rows = jax.NamedSharding(mesh, jax.P("data"))
        params, batch = jax.device_put(params, rows), jax.device_put(batch, rows)
    elif kind == "fp16":  # begins above what float16 can hold: windows are skipped, the scale falls and grows again
        scale = DynamicLossScale(initial=2.0**22, growth_interval=3)
        config = jaxmem.MemoryConfig(precision=jaxmem.Precision(compute="float16", loss_scale=scale))
    elif kind == "multi_steps":  # saved in mid-window, mostly
        optimizer = multi_steps(optimizer, 5)
    workload = jaxmem.Workload(_loss, params, batch, optimizer, rng=jax.random.key(7))
    return jaxmem.make_train_step(workload, config)


def prepare(kind: str) -> None:
    """What a process needs before its backend starts."""
    os.environ["XLA_FLAGS"] = "--xla_backend_optimization_level=0"  # runs are short, and each compiles its step
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4 if kind == "sharded" else 1)


def digest(tree) -> str:
    """Of the names, dtypes, shapes and bytes of all leaves; two trees have one digest if they are equal to the bit."""
    said = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if key else leaf)
        said.update(f"{jax.tree_util.keystr(path)} {leaf.dtype} {array.shape}".encode() + array.tobytes())
    return said.hexdigest()


def trajectory(tell: Tell, kind: str) -> None:
    """Tells the digest of the state at each window of a run that is neither saved nor stopped."""
    step = step_of(kind)
    state = step.init()
    digests = [digest(state)]
    for window in range(WINDOWS):
        state, _ = step(state, data(window))
        digests.append(digest(state))
    tell("digests", digests)


def train(tell: Tell, kind: str, folder: str, save_every: int) -> None:
    """Trains to the last window, from the folder's checkpoint where there is one; tells each window, and the end."""
    step = step_of(kind)
    tell("begins")

    def told(window):
        tell("window", window)
        return data(window)

    with Manager(folder, keep=KEEP) as manager:
        state = train_loop(step, step.init, told, WINDOWS, checkpoint=manager, save_every=save_every, progress=False)
    tell("ends", digest(state))


def look(tell: Tell, kind: str, folder: str) -> None:
    """Tells number → digest of every complete checkpoint, or why it cannot be restored."""
    found = {}
    for checkpoint in Manager(folder).checkpoints():
        try:
            found[checkpoint.number] = digest(restore(checkpoint, step_of(kind)))
        except JaxmemError as error:
            found[checkpoint.number] = f"{type(error).__name__}: {error}"
    tell("found", found)


def hold(tell: Tell, kind: str, folder: str) -> None:
    """Saves the state at window 3 and keeps the folder."""
    step = step_of(kind)
    state = step.init()
    for window in range(3):
        state, _ = step(state, data(window))
    with Manager(folder, keep=KEEP) as manager:
        manager.save(state, number=3)
        manager.wait()
        tell("holds")
        time.sleep(600)


def three(tell: Tell, kind: str, folder: str, seed: int) -> None:
    """Saves the states at windows 1 to 3 of a run with the key of a seed; tells number → digest."""
    step, digests = step_of(kind), {}
    state = step.init(jax.random.key(seed))
    for window in range(3):
        state, _ = step(state, data(window))
        save(folder, state, number=window + 1)
        digests[window + 1] = digest(state)
    tell("digests", digests)


def damaged(tell: Tell, kind: str, folder: str, stranger: str, digests: dict[int, str], seed: int) -> None:
    """Does every damage to each of three checkpoints in turn, and tells its name and what was wrong about it."""
    step = step_of(kind)

    def digest_of(number):
        return digest(restore(folder, step, number=number))

    for number in digests:
        path, saved = Path(folder, str(number)), Path(f"{folder}-{number}")
        shutil.copytree(path, saved)
        other = Path(folder, str(number % 3 + 1))
        for name, damage in damages(saved, other=other, stranger=Path(stranger, str(number)), seed=seed + number):
            damage(path)
            tell("damage", [f"{number}/{name}", complaints(Path(folder), number, digest_of, digests)])
            shutil.rmtree(path)
            shutil.copytree(saved, path)
        if digest_of(number) != digests[number]:
            raise RuntimeError("a checkpoint that was put back is not restored")
