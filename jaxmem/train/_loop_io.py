"""What the training loop touches outside the device: data, the metrics file, how far it is, Ctrl-C."""

import json
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping

from jaxmem.errors import WorkloadError


class MetricsFile:
    """JSON lines, flushed one by one. The file is opened with the first line: an early error leaves none.

    Args:
      path: where to write; None writes nothing.
      append: keep the lines that are there (a resumed run) rather than start anew.
    """

    def __init__(self, path: str | None, *, append: bool):
        self._path, self._mode, self._stream = path, "a" if append else "w", None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._stream is not None:
            self._stream.close()

    def write(self, record: dict):
        if self._path is None:
            return
        if self._stream is None:
            self._stream = open(self._path, self._mode, encoding="utf-8")  # noqa: SIM115
        self._stream.write(json.dumps(_json_value(record), allow_nan=False) + "\n")
        self._stream.flush()


def _json_value(value):
    """JSON has no NaN and no infinity: null stands for them.

    >>> _json_value({"loss": 1.5, "perplexity": float("inf")})
    {'loss': 1.5, 'perplexity': None}
    """
    if isinstance(value, dict):
        return {key: _json_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_json_value(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Interrupts:
    """While it is open, the first Ctrl-C only sets `requested`; a second one raises KeyboardInterrupt.

    Python lets only the main thread set signal handlers: elsewhere Ctrl-C keeps its usual meaning.
    """

    def __init__(self):
        self.requested = False
        self._previous = None

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.getsignal(signal.SIGINT)
            if self._previous is not None:  # None: set outside Python, and so not ours to put back
                signal.signal(signal.SIGINT, self._handle)
        return self

    def __exit__(self, *_):
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _handle(self, signum, frame):
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        # os.write: print may be in the middle of a line of its own when a signal comes.
        os.write(2, b"\nFinishing the current step; press Ctrl-C again to abort.\n")


LINE_SECONDS = 20.0
# The bar's thread and the loop share Python's lock: drawn ten times a second, as rich does, it costs small steps 2 %.
DRAWS_A_SECOND = 2


class Progress:
    """Windows done, loss, steps a second and time left, on stderr: a bar on a terminal, elsewhere lines.

    Args:
      total: windows to train.
      shown: whether to show anything.
      line_seconds: between two lines at least.
    """

    def __init__(self, total: int, *, shown: bool, line_seconds: float = LINE_SECONDS):
        self._total, self._bar = total, None
        self._on_terminal = shown and sys.stderr.isatty()
        self._line_seconds = line_seconds if shown else math.inf
        self._advanced, self._last = 0, None
        self._drawn = time.perf_counter()  # when the bar or a line last was

    def __enter__(self):
        if self._on_terminal:
            # rich costs 50 ms to import and a run without a terminal needs none of it.
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[loss]}"),
                TextColumn("{task.fields[rate]}"),
                TimeElapsedColumn(),
                TextColumn("{task.fields[left]}"),
                console=Console(stderr=True),
                redirect_stdout=sys.stdout.isatty(),  # a piped stdout must not end up on the terminal
                refresh_per_second=DRAWS_A_SECOND,
            )
            self._bar.start()
            self._task = self._bar.add_task("compiling", total=self._total, loss="", rate="", left="")
        return self

    def __exit__(self, *_):
        if self._bar is not None:
            self._bar.stop()

    def advance(self):
        """One more window is under way."""
        self._advanced += 1
        if self._bar is not None and self._advanced > 1 and time.perf_counter() - self._drawn > 1 / DRAWS_A_SECOND:
            self._drawn = time.perf_counter()
            self._bar.update(self._task, completed=self._advanced)

    def show(self, record: dict):
        """The reading of a window whose steps have all finished."""
        now, done = time.perf_counter(), self._advanced
        # The first window compiles: speed is measured between readings, from the first one on.
        rate = None if self._last is None else (done - self._last[1]) / max(now - self._last[0], 1e-9)
        self._last = (now, done)
        speed = "" if rate is None else f"{rate:.3g} steps/s"
        left = "" if not rate else f"{_clock((self._total - done) / rate)} left"
        if self._bar is not None:
            loss = record.get("loss")
            loss = "" if loss is None else f"loss {loss:.4g}{_scaling(record)}"
            state = {"completed": done, "description": "training"}
            self._bar.update(self._task, **state, loss=loss, rate=speed, left=left)
        elif now - self._drawn >= self._line_seconds:
            self._drawn = now
            values = " ".join(f"{k} {v:.6g}" for k, v in record.items() if isinstance(v, float) and k != "seconds")
            times = ", ".join(filter(None, (f"{record['seconds']:.1f} s", speed, left)))
            print(f"step {record['step']} {values} ({times})", file=sys.stderr, flush=True)


def _scaling(record: dict) -> str:
    """The loss scale and the windows skipped, where the step scales its loss.

    >>> _scaling({"loss": 1.0, "loss_scale": 32768.0, "skipped": 2.0})
    ', scale 32768, 2 skipped'
    """
    if not {"loss_scale", "skipped"} <= set(record):
        return ""
    return f", scale {record['loss_scale']:g}" + (f", {record['skipped']:g} skipped" if record["skipped"] else "")


def _clock(seconds: float) -> str:
    """Hours, minutes and seconds.

    >>> _clock(75), _clock(7322)
    ('1:15', '2:02:02')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def batches_of(data, first: int, num_steps: int) -> Iterator:
    """The batches of windows `first`, `first + 1`, …: at most `num_steps` of them are fetched."""
    if data is None:
        raise WorkloadError(
            wanted="data to train on: an iterable of batches, or a function window_index -> batch",
            got="None",
            do="Pass Workload(..., data=...), or the data argument of train_loop.",
        )
    if isinstance(data, (Mapping, str, bytes)):  # iterating over one gives its keys
        raise WorkloadError(
            wanted="data to be an iterable of batches or a function window_index -> batch",
            got=f"a {type(data).__name__}",
            do="To train on one batch over and over, pass lambda window: batch.",
        )
    if hasattr(data, "__iter__") or hasattr(data, "__next__"):
        iterator = iter(data)
        # range comes first in zip: after the last window no batch is taken from the iterator in vain.
        return (batch for _, batch in zip(range(num_steps), iterator, strict=False))
    if callable(data):
        return (data(window) for window in range(first, first + num_steps))
    raise WorkloadError(
        wanted="data to be an iterable of batches or a function window_index -> batch",
        got=f"a {type(data).__name__}",
        do="Wrap it in one of these.",
    )
