"""What `train_loop` and its progress bar add to a loop written by hand: 300 small steps, in pairs.

    python -m benchmarks.loop_overhead --json -

All loops call the same jitted step on the same batches and read metrics every tenth step. The bar is drawn on a
pseudo-terminal. The time of a run leaves out its first step, and with it the report that `train_loop` makes of the
compiled step. Where others use the machine too, look at the ratios of CPU time.
"""

import contextlib
import os
import pty
import sys
import threading
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._harness import emit
from examples import gpt
from jaxmem import make_train_step, train_loop

STEPS, LOG_EVERY, PAIRS = 300, 10, 12


class Timed:
    """Data with the time at which the first step has run and been read: that of its second call."""

    def __init__(self, data):
        self.data, self.wall, self.cpu = data, 0.0, 0.0

    def __call__(self, window):
        if window == 1:
            self.wall, self.cpu = time.perf_counter(), time.process_time()
        return self.data(window)


def by_hand(step, state, data):
    """What a careful person writes: a reading every tenth step, nothing between."""
    for window in range(STEPS):
        state, metrics = step(state, data(window))
        if window == 0 or (window + 1) % LOG_EVERY == 0:
            jax.device_get(metrics)


def with_loop(step, state, data, *, progress):
    train_loop(step, state, data, STEPS, log_every=LOG_EVERY, progress=progress)


@contextlib.contextmanager
def terminal():
    """stderr is a terminal, which somebody reads."""
    ours, theirs = pty.openpty()
    reader = threading.Thread(target=_drain, args=(ours,), daemon=True)
    reader.start()
    with os.fdopen(theirs, "w") as stderr, mock.patch.object(sys, "stderr", stderr):
        yield
    reader.join(1)
    os.close(ours)


def _drain(descriptor):
    with contextlib.suppress(OSError):  # the other end was closed
        while os.read(descriptor, 2**16):
            pass


def seconds(run, step, start, batches) -> tuple[float, float]:
    """Of all steps but the first: by the clock, and of this process's threads on all cores."""
    data = Timed(lambda window: batches[window % len(batches)])
    run(step, jax.block_until_ready(jax.tree.map(jnp.copy, start)), data)
    return time.perf_counter() - data.wall, time.process_time() - data.cpu


def main():
    workload = gpt.workload(batch=4, seq=32, layers=2, width=32, heads=2)
    step = make_train_step(workload)
    start, batches = step.init(), [workload.data(window) for window in range(16)]

    def bar(*given):
        with terminal():
            with_loop(*given, progress=True)

    runs = {"hand": by_hand, "silent": lambda *given: with_loop(*given, progress=False), "bar": bar}
    times = {name: [] for name in runs}
    for number in range(PAIRS + 1):
        names = list(runs) if number % 2 else list(runs)[::-1]
        for name in names:
            taken = seconds(runs[name], step, start, batches)
            if number:  # the first ones warm up
                times[name].append(taken)
    times = {name: np.array(taken).T for name, taken in times.items()}  # (clock or CPU, pair)
    figures = {"step_seconds": float(np.median(times["hand"][0])) / (STEPS - 1), "pairs": PAIRS, "steps": STEPS}
    for ours, theirs in (("bar", "silent"), ("silent", "hand"), ("bar", "hand")):
        for kind, ratios in zip(("clock", "cpu"), times[ours] / times[theirs], strict=True):
            figures[f"{ours}_vs_{theirs}_{kind}"] = float(np.median(ratios))
    emit(
        figures,
        target=jax.default_backend(),
        provenance={"step_seconds": "measured", "ratios": "measured"},
        notes={
            "seconds": {name: taken.tolist() for name, taken in times.items()},
            "wanted": {"bar_vs_silent_clock": 1.02},
        },
    )


if __name__ == "__main__":
    main()
