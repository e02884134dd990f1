"""What a training loop reads from the device: metrics, which it checks, and the memory that they took."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxmem.errors import MetricError, NonFiniteError, TooManySkippedWindows
from jaxmem.train._loop_io import on_schedule
from jaxmem.train._loop_memory import LoopMemory, Watch
from jaxmem.workload import path_string

RESERVED_METRICS = ("step", "window", "seconds", "memory")


class Readings:
    """Reads metrics from the device, checks them and hands them on.

    Every window that is read is checked, and only those are logged that a run without a stop logs as well; but for the
    last window of the loop.

    Args:
      first: the first window of the loop.
      resumed: whether windows before it were trained, and logged, by another loop.
      log_every: windows between two that are logged.
      max_skipped: windows in a row.
      sinks: called with each record that is logged.
      show: called also with that of the first window.
    """

    def __init__(self, *, first: int, resumed: bool, log_every: int, max_skipped: int, sinks, show):
        self._started, self._first, self._max_skipped = time.perf_counter(), first, max_skipped
        self._log_every, self._resumed, self._sinks, self._show = log_every, resumed, sinks, show
        self._finite_window: int | None = None
        self._window, self._logged = first - 1, False
        self.record: dict[str, Any] = {}  # the last
        self.watch: Watch | None = None
        self.memory: LoopMemory | None = None

    def due(self, window: int) -> bool:
        """Whether the window is to be read."""
        return window == self._first or on_schedule(window, self._log_every)

    def take(self, window: int, state, metrics: Mapping[str, Any], *, last: bool = False) -> dict[str, Any]:
        """The record of `window`; waits for the device. The last window may be taken a second time."""
        if window != self._window:
            self.record, self._window, self._logged = self._read(window, state, metrics), window, False
        begins = window == self._first
        logs = last or on_schedule(window, self._log_every) or (begins and not self._resumed)
        if not self._logged and (logs or begins):
            self._show(self.record)
        if not self._logged and logs:
            self._logged = True
            for sink in self._sinks:
                sink(self.record)
        return self.record

    def _read(self, window: int, state, metrics: Mapping[str, Any]) -> dict[str, Any]:
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
