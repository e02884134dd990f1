"""What the training loop touches outside the device: the metrics file, how far it is, stderr, signals."""

import json
import math
import os
import shutil
import signal
import sys
import threading
import time
from typing import Literal

from jaxmem._processes import is_main


def on_schedule(window: int, log_every: int) -> bool:
    """Whether the metrics of a window are logged wherever a run begins and ends."""
    return window == 0 or (window + 1) % log_every == 0


class MetricsFile:
    """JSON lines, flushed one by one. The file is opened with the first line: an early error leaves none.

    Args:
      path: where to write; None writes nothing.
      append: keep the lines that are there rather than start anew.
      trim: (window, log_every) of a run that goes on from a checkpoint: of the lines that are there, those stay that
        a run without a stop would have written before that window.
    """

    def __init__(self, path: str | None, *, append: bool, trim: tuple[int, int] | None = None):
        self._path = path if is_main() else None
        self._mode, self._trim, self._stream = "a" if append else "w", trim, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._stream is not None:
            self._stream.close()

    def write(self, record: dict):
        if self._path is None:
            return
        if self._stream is None:
            if self._trim is not None:
                _drop_lines(self._path, *self._trim)
            self._stream = open(self._path, self._mode, encoding="utf-8")  # noqa: SIM115
        self._stream.write(json.dumps(_json_value(record), allow_nan=False) + "\n")
        self._stream.flush()


def _drop_lines(path: str, first: int, log_every: int) -> None:
    """Drops the lines of windows from `first` on, a line that was not finished, and one that was due to a stop.

    The file is replaced as a whole. What is no regular file stays as it is.
    """
    path = os.path.realpath(path)
    if not os.path.isfile(path):
        return
    with open(path, "rb") as stream:
        lines = stream.readlines()
    windows = [(line, window) for line in lines if (window := _window(line)) is not None and window < first]
    if windows and not on_schedule(windows[-1][1], log_every):
        windows.pop()
    if len(windows) == len(lines):
        return
    part = f"{path}.part"
    with open(part, "wb") as stream:
        stream.writelines(line for line, _ in windows)
        stream.flush()
        os.fsync(stream.fileno())
    shutil.copymode(path, part)
    os.replace(part, path)


def _window(line: bytes) -> int | None:
    """That of a line of metrics; None of a line that was not finished."""
    try:
        return int(json.loads(line)["window"]) if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


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
    """While it is open, the first Ctrl-C or SIGTERM only sets `stopped`; a Ctrl-C after it raises KeyboardInterrupt.

    SIGHUP, which a terminal sends that is closed, counts as SIGTERM, unless it is ignored, as under nohup. Python lets
    only the main thread set signal handlers: elsewhere all keep their usual meaning.

    Args:
      terminate: whether SIGTERM and SIGHUP are of concern.
    """

    def __init__(self, *, terminate: bool):
        self.stopped: Literal["", "interrupted", "terminated"] = ""
        self._signals = [signal.SIGINT]
        if terminate:
            ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
            self._signals += [signal.SIGTERM] if ignored else [signal.SIGTERM, signal.SIGHUP]
        self._terminals = []
        self._previous = {}

    def __enter__(self):
        self._terminals = [file for file in (1, 2) if os.isatty(file)]
        if threading.current_thread() is threading.main_thread():
            for number in self._signals:
                previous = signal.getsignal(number)
                if previous is not None:  # None: set outside Python, and so not ours to put back
                    self._previous[number] = previous
                    signal.signal(number, self._handle)
        return self

    def __exit__(self, *_):
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, signum, frame):
        if signum == signal.SIGHUP:  # what is said from now on has nowhere to go, and must not raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            for file in self._terminals:
                os.dup2(nowhere, file)
            os.close(nowhere)
        if signum in (signal.SIGTERM, signal.SIGHUP):  # some senders repeat it
            first, self.stopped = not self.stopped, self.stopped or "terminated"
            said = f"\n{signal.Signals(signum).name}: finishing the current step.\n".encode() if first else b""
        elif self.stopped:
            raise KeyboardInterrupt
        else:
            self.stopped = "interrupted"
            said = b"\nFinishing the current step; press Ctrl-C again to abort.\n"
        # os.write: print may be in the middle of a line of its own when a signal comes.
        os.write(2, said)


LINE_SECONDS = 20.0
# The bar's thread and the loop share Python's lock: drawn ten times a second, as rich does, it costs small steps 2 %.
DRAWS_A_SECOND = 2


class Progress:
    """Windows done, loss, steps a second and time left, on stderr: a bar on a terminal, elsewhere lines.

    Args:
      total: windows to train.
      before: how many of them were trained before.
      shown: whether to show anything.
      line_seconds: between two lines at least.
    """

    def __init__(self, total: int, *, shown: bool, before: int = 0, line_seconds: float = LINE_SECONDS):
        shown = shown and is_main()
        self._total, self._bar = total, None
        self._on_terminal = shown and sys.stderr.isatty()
        self._line_seconds = line_seconds if shown else math.inf
        self._before, self._advanced, self._last = before, before, None
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
            self._task = self._bar.add_task(
                "compiling", total=self._total, completed=self._before, loss="", rate="", left=""
            )
        return self

    def __exit__(self, *_):
        if self._bar is not None:
            if self._advanced > self._before:
                self._bar.update(self._task, description="training")
            self._bar.stop()

    def advance(self):
        """One more window is under way."""
        self._advanced += 1
        if (
            self._bar is not None
            and self._advanced > self._before + 1
            and time.perf_counter() - self._drawn > 1 / DRAWS_A_SECOND
        ):
            self._drawn = time.perf_counter()
            self._bar.update(self._task, completed=self._advanced, description="training")

    def saving(self):
        """A checkpoint is being copied from the device, or waits for the one before."""
        if self._bar is not None:
            self._bar.update(self._task, description="saving")

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
