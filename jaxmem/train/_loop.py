"""The training loop: data in, metrics out, and a clean stop."""

import collections
import dataclasses
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import jax
import numpy as np

from jaxmem._blame import warn
from jaxmem._cell import shortening
from jaxmem.errors import (
    InputError,
    MetricError,
    NonFiniteError,
    SettingWarning,
    StateError,
    TooManySkippedWindows,
    WorkloadError,
)
from jaxmem.train._loop_io import LINE_SECONDS, Interrupts, MetricsFile, Progress, batches_of
from jaxmem.train._loop_memory import LoopMemory, Watch
from jaxmem.train._state import check_alive
from jaxmem.workload import path_string

# Windows dispatched ahead of the device. Each holds its batch in device memory, and Ctrl-C waits for
# all of them; a few are enough to keep the device busy.
WINDOWS_IN_FLIGHT = 4
# In a row. From its default maximum, 2**24, a loss scale is halved 24 times until it is 1: what still overflows after
# twice as many windows is not the scale's doing.
MAX_SKIPPED = 50
RESERVED_METRICS = ("step", "window", "seconds", "memory")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopResult:
    """What a loop did.

    Args:
      state: the TrainState after the last window.
      windows: how many windows were trained.
      stopped: why it ended: all of them done, the data ended, or Ctrl-C.
      metrics: the last record of metrics.
      memory: the peak of training, measured, beside the compiled one; None of a step that cannot be compiled ahead.
    """

    state: Any
    windows: int
    stopped: Literal["done", "data ended", "interrupted"]
    metrics: Mapping[str, Any]
    memory: LoopMemory | None = None


@shortening()
def train_loop(
    step,
    state,
    data: Callable[[int], Any] | Iterable | None,
    num_steps: int,
    *,
    log_every: int = 10,
    metrics_path: str | None = None,
    progress: bool = True,
    on_metrics: Callable[[dict], None] | None = None,
    max_skipped: int = MAX_SKIPPED,
):
    """Trains `num_steps` windows from `state` and returns the new state; `state` itself is donated.

    The device is waited for where metrics are read (the first window, every `log_every`-th, the
    last), and otherwise only so that no more than `WINDOWS_IN_FLIGHT` windows are under way.
    Ctrl-C finishes the windows under way, writes their metrics and returns; a second one aborts.

    Training tells the truth about its memory: its peak is measured (on a CPU, by the growth of the process) beside the
    compiled step's, which is shown at the end. A MemoryWarning says where they contradict each other.

    Args:
      step: what `make_train_step` returns: `step(state, batch) -> (state, metrics)`.
      state: a TrainState; its `window` says where to go on.
      data: a function of the window index, called with `state.window` and up, so that a restored
        state resumes exactly; or an iterable of batches, which starts wherever it stands. One that
        ends early stops the loop with a message.
      num_steps: how many windows to train in this call.
      log_every: windows between two readings of metrics.
      metrics_path: file for one JSON line a reading: step, window, loss, every metric, seconds since
        the loop began, and the memory of a `TrainStep` as `LoopMemory.to_dict()`. An infinite metric is written as
        null, and so is NaN in a window that was skipped for it. A state past its first window appends.
      progress: whether to show on stderr how far training is: a bar on a terminal, elsewhere a line now and then;
        and the peak of memory at the end.
      on_metrics: called with each record.
      max_skipped: how many windows in a row a step with a loss scale may skip, looked at where metrics are read.

    Raises:
      NonFiniteError: the loss is NaN or infinite, or another metric is NaN, in a window that was not skipped for
        it; that window is not logged.
      TooManySkippedWindows: more than `max_skipped` in a row.
      WorkloadError: no data, or an iterable without a single batch.

    >>> import jax.numpy as jnp, optax, jaxmem
    >>> loss = lambda params, batch: jnp.mean((batch @ params) ** 2)
    >>> workload = jaxmem.Workload(loss, jnp.ones(2), jnp.ones((4, 2)), optax.sgd(0.1))
    >>> step = jaxmem.make_train_step(workload)
    >>> state = train_loop(step, step.init(), lambda window: jnp.ones((4, 2)), 3)
    >>> int(state.window)
    3
    """
    return run_loop(
        step,
        state,
        data,
        num_steps,
        log_every=log_every,
        metrics_path=metrics_path,
        progress=progress,
        on_metrics=on_metrics,
        max_skipped=max_skipped,
    ).state


def run_loop(
    step,
    state,
    data,
    num_steps: int,
    *,
    log_every=10,
    metrics_path=None,
    progress=True,
    on_metrics=None,
    max_skipped=MAX_SKIPPED,
    line_seconds=LINE_SECONDS,
) -> LoopResult:
    """`train_loop`, saying also how it ended.

    Args:
      line_seconds: between two lines of progress where there is no terminal; 0 for a line a reading.
    """
    _check_counts(num_steps=num_steps, log_every=log_every, max_skipped=max_skipped)
    _check_given(step, state)
    check_alive(state)
    if max_skipped != MAX_SKIPPED and getattr(state, "loss_scale", None) is None:
        message = f"max_skipped={max_skipped} does nothing, as windows are skipped under a loss scale only."
        warn(message, SettingWarning)
    first = int(state.window)
    batches = batches_of(data, first, num_steps)
    stopped, record, metrics = "data ended", {}, None
    in_flight = collections.deque()
    window = first - 1
    with (
        Progress(num_steps, shown=progress, line_seconds=line_seconds) as bar,
        MetricsFile(metrics_path, append=first > 0) as log,
        Interrupts() as interrupts,
    ):
        sinks = (log.write, bar.show, on_metrics)
        readings = _Readings(started=time.perf_counter(), first=first, sinks=sinks, max_skipped=max_skipped)
        for window, batch in enumerate(batches, start=first):
            if window == first:
                readings.watch = Watch.of(step, state, batch, in_flight=WINDOWS_IN_FLIGHT)
            state, metrics = step(state, batch)
            bar.advance()
            if window - first + 1 == num_steps:
                stopped = "done"
                break
            if interrupts.requested:
                stopped = "interrupted"
                break
            if window == first or (window + 1) % log_every == 0:
                record = readings.take(window, state, metrics)
                metrics = None
                in_flight.clear()
                if interrupts.requested:  # while the device was waited for
                    stopped = "interrupted"
                    break
            else:
                in_flight.append(metrics)
                if len(in_flight) >= WINDOWS_IN_FLIGHT:
                    jax.block_until_ready(in_flight.popleft())
        if window < first:
            raise WorkloadError(
                wanted="data with at least one batch",
                got="an iterable that yields none",
                do="Check where it reads from.",
            )
        if metrics is not None:  # the last window has not been read yet
            record = readings.take(window, state, metrics)
    if stopped == "data ended":
        print(f"jaxmem: data ended after {window - first + 1} of {num_steps} windows", file=sys.stderr)
    if progress and readings.memory is not None:
        print(f"jaxmem: {readings.memory}", file=sys.stderr)
    return LoopResult(state=state, windows=window - first + 1, stopped=stopped, metrics=record, memory=readings.memory)


class _Readings:
    """Reads metrics from the device, checks them and hands them on."""

    def __init__(self, *, started: float, first: int, sinks, max_skipped: int):
        self._started, self._max_skipped = started, max_skipped
        self._sinks = [sink for sink in sinks if sink is not None]
        self._finite_window: int | None = None
        self._first = first
        self.watch: Watch | None = None
        self.memory: LoopMemory | None = None

    def take(self, window: int, state, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The record of `window`; waits for the device."""
        taken = [name for name in RESERVED_METRICS if name in metrics]
        if taken:
            raise MetricError(
                wanted=f"metrics with names other than {', '.join(RESERVED_METRICS)}",
                got=", ".join(map(repr, taken)),
                do="Rename them in the LossOutput.",
            )
        step_count, scaling, values = jax.device_get((state.step, getattr(state, "loss_scale", None), dict(metrics)))
        values = {path_string(path): value for path, value in jax.tree_util.tree_leaves_with_path(values)}
        seconds = time.perf_counter() - self._started
        # jit returns a dict in the order of its keys; the loss goes first, and is the first to be blamed.
        names = sorted(values, key=lambda name: name != "loss")
        numbers = {name: _number(values[name]) for name in names}
        skipped = 0 if scaling is None else int(scaling.skipped_in_a_row)
        if scaling is not None and skipped > self._max_skipped:
            raise _too_many(skipped, float(scaling.scale), int(step_count), window)
        if not skipped:
            self._check_finite(numbers, int(step_count), window)
            self._finite_window = window
        record = {"step": int(step_count), "window": window, **numbers, "seconds": seconds}
        if self.watch is not None and (memory := self.watch.look()) is not None:
            self.memory = memory
            record["memory"] = memory.to_dict()
        for sink in self._sinks:
            sink(record)
        return record

    def _check_finite(self, numbers: dict[str, Any], step_count: int, window: int):
        for name, value in numbers.items():
            values = np.asarray(value)
            bad = ~np.isfinite(values) if name == "loss" else np.isnan(values)
            if not bad.any():
                continue
            if self._finite_window is None and window == self._first:
                cure = (
                    "It is so from the first window: look for NaN in the parameters, in the batch, and in the "
                    "weight of each WeightedMean."
                )
            else:
                cure = (
                    f"It was still finite at window {self._finite_window}: lower the learning rate, clip gradients "
                    "(optax.clip_by_global_norm), or look for NaN in the later batches; log_every=1 finds the window, "
                    'jax.config.update("jax_debug_nans", True) the operation.'
                )
            kind = "NaN" if np.isnan(values).any() else "infinity"
            raise NonFiniteError(
                wanted=f"a finite {name}", got=f"{kind} in {name!r} at step {step_count} (window {window})", do=cure
            )


def _too_many(skipped: int, scale: float, step_count: int, window: int) -> TooManySkippedWindows:
    return TooManySkippedWindows(
        wanted="a window now and then whose loss and gradients are finite",
        got=f"{skipped} skipped in a row at step {step_count} (window {window}), the loss scale down to {scale:g}",
        do="Gradients overflow whatever the scale, or a static one is too large. Look for NaN in the parameters, and "
        "for values beyond 65504 in the batch, which float16 cannot hold; sum and normalise in float32; or compute in "
        "bfloat16, which has float32's range.",
    )


def _number(value):
    """A float, or nested lists of floats for a metric that is not a scalar."""
    array = np.asarray(value, dtype=np.float64)
    return float(array) if array.ndim == 0 else array.tolist()


def _check_given(step: Any, state: Any) -> None:
    if not callable(step) or not hasattr(state, "window"):
        raise StateError(
            wanted="train_loop(step, state, data, num_steps): a step of make_train_step, a state of step.init()",
            got=f"a {type(step).__name__} and a {type(state).__name__}",
            do="Write step = make_train_step(workload); train_loop(step, step.init(), workload.data, 100).",
        )


def _check_counts(**counts):
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise InputError(
                wanted=f"{name} to be a whole number of at least 1", got=repr(value), do=f"Choose another {name}."
            )
