"""What the first step after a restore takes, against a later one, and how much without copies in buffers of XLA's own.

    python -m benchmarks.resume_memory --json -

A new process makes a state, drops it, restores another and trains on, as a script does that is started again. (In
memory that was freed before, what Orbax reads is aligned more often, and then XLA only borrows it.) Each step's peak is
measured twice: as live bytes of glibc's allocator, read every half millisecond while the step runs, and as the
process's resident memory, of which the kernel keeps the maximum. Both leave out what was there before the step and is
not the state. The figures are of live bytes; resident memory stands among the runs: that of a first step also has the
pages which the runtime touches for the first time, here 10 MiB.
"""

import argparse
import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
from benchmarks._harness import emit
from jaxmem import checkpoint
from jaxmem.checkpoint import _read
from jaxmem.targets._device_memory import process_memory, restart_process_peak
from jaxmem.train._program import compile_here

WIDTH, LAYERS, ROWS, STEPS, RUNS = 2048, 8, 64, 5, 3


def make_step() -> jaxmem.TrainStep:
    """A step whose state has 24 leaves of 16 MiB: 8 of parameters, 16 of Adam's moments."""

    def create(key):
        return [jax.random.normal(k, (WIDTH, WIDTH)) / WIDTH**0.5 for k in jax.random.split(key, LAYERS)]

    def loss(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    workload = jaxmem.Workload(loss, create, jnp.ones((ROWS, WIDTH)), optax.adam(1e-3))
    return jaxmem.make_train_step(workload)


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "k")
    )


_mallinfo = ctypes.CDLL(None).mallinfo2
_mallinfo.restype = _Mallinfo


def live_bytes() -> int:
    """Bytes that are allocated and not freed: in arenas, and as mappings."""
    told = _mallinfo()
    return told.uordblks + told.hblkhd


class MostLive(contextlib.AbstractContextManager):
    """The most `live_bytes` while it is entered, as `most`."""

    def __enter__(self):
        self.most, self.done = live_bytes(), threading.Event()
        self.thread = threading.Thread(target=self._watch)
        self.thread.start()
        return self

    def _watch(self):
        while not self.done.is_set():
            self.most = max(self.most, live_bytes())
            time.sleep(0.0005)

    def __exit__(self, *_):
        self.done.set()
        self.thread.join()


def resumed(folder: str, cure: bool) -> dict[str, list]:
    """Peaks of each step after a restore, and the share of the state's bytes that the first step reuses."""
    step = make_step()
    batch = np.ones((ROWS, WIDTH), np.float32)
    jax.block_until_ready(step.init())
    without = contextlib.nullcontext() if cure else mock.patch.object(_read, "owned", lambda array: array)
    with without:
        state = checkpoint.restore(folder, step)
    found: dict[str, list] = {"live": [], "resident": [], "reused": []}
    compile_here(step.spec, state, batch)
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params) + jax.tree.leaves(state.opt_state))
    for _ in range(STEPS):
        pointers = _pointers(state)
        restart_process_peak()
        before, resident = live_bytes(), process_memory().in_use_bytes or 0
        with MostLive() as live:
            state, metrics = step(state, batch)
            jax.block_until_ready((state, metrics))
        found["live"].append(live.most - before + held)
        found["resident"].append((process_memory().peak_bytes or 0) - resident + held)
        after = _pointers(state)
        found["reused"].append(sum(size for at, size in after.items() if at in pointers) / sum(after.values()))
    return found


def _pointers(state) -> dict[int, int]:
    leaves = jax.tree.leaves((state.params, state.opt_state))
    return {leaf.unsafe_buffer_pointer(): leaf.nbytes for leaf in leaves}


def ratios(found: dict[str, list]) -> dict[str, float]:
    """The first step against the largest of the later ones."""
    return {name: found[name][0] / max(found[name][1:]) for name in ("live", "resident")}


def _in_process(folder: str, what: str) -> dict:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "benchmarks.resume_memory", "--part", what, "--folder", folder]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", default="-", metavar="OUT", help='a file, or "-" for stdout')
    parser.add_argument("--part", choices=("cured", "plain"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        print(json.dumps(resumed(options.folder, options.part == "cured")))
        return
    step = make_step()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(folder, step.init(), number=1)
        found = {part: [_in_process(folder, part) for _ in range(RUNS)] for part in ("cured", "plain")}
    worst = {
        part: {of: max(ratios(run)[of] for run in runs) for of in ("live", "resident")} for part, runs in found.items()
    }
    figures = {
        "first_over_later": worst["cured"]["live"],
        "without_cure": worst["plain"]["live"],
        "reused": min(run["reused"][0] for run in found["cured"]),
        "reused_without_cure": min(run["reused"][0] for run in found["plain"]),
    }
    emit(figures, target="cpu", provenance=dict.fromkeys(figures, "measured"), notes={"runs": found}, out=options.json)


if __name__ == "__main__":
    main()
