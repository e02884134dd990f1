"""Runs in processes of their own that cost no imports: forked from one that has imported JAX and started no backend."""

import functools
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks._file_hook import FileHook, die


class Event(NamedTuple):
    """What a process told: when, by the monotonic clock, after how many operations on files, and what."""

    seconds: float
    operations: int
    name: str
    value: Any


class Forked:
    """A process in a group of its own that calls `function(tell, *args)`; `tell(name, value)` reaches `events`.

    It tells its warnings as "warning", what it raises as "error", and "over" at its end.

    Args:
      function: runs in the new process.
      args: its arguments.
      prepare: called before it.
      watched: a folder; the operations counted are those on files below it that Python does.
      die_at: (n, seconds): SIGKILL so many seconds after the n-th of them is about to begin.
    """

    def __init__(
        self,
        function: Callable,
        *args: Any,
        prepare: Callable[[], None] = lambda: None,
        watched: Path | None = None,
        die_at: tuple[int, float] | None = None,
    ):
        self.events: list[Event] = []
        self._unread, self._rest = tempfile.TemporaryFile(), b""  # noqa: SIM115, it lives as long as this
        self._pipe, write = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            self._be(write, function, args, prepare, watched, die_at)
        os.close(write)

    def _be(self, write, function, args, prepare, watched, die_at):
        """The new process; it ends here."""
        code, lock = 1, threading.Lock()
        hook = FileHook(watched, die_at and (die_at[0], functools.partial(die, die_at[1])))

        def tell(name, value=None):
            line = json.dumps([time.monotonic(), hook.seen, name, value]).encode() + b"\n"
            with lock:
                os.write(write, line)

        try:
            os.setpgid(0, 0)
            os.dup2(self._unread.fileno(), 1)
            os.dup2(self._unread.fileno(), 2)
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, category, *_: tell("warning", f"{category.__name__}: {message}")
            prepare()
            function(tell, *args)
            code = 0
        except BaseException as error:
            tell("error", f"{type(error).__name__}: {error}")
            traceback.print_exc()
        finally:
            tell("over")
            sys.stderr.flush()
            os._exit(code)

    def output(self) -> str:
        """What the process wrote to stdout and stderr."""
        self._unread.seek(0)
        return self._unread.read().decode(errors="replace")

    def all(self, name: str) -> list[Event]:
        """The events of a name."""
        return [event for event in self.events if event.name == name]

    def value(self, name: str, default: Any = None) -> Any:
        """That of the last event of a name."""
        return ([default] + [event.value for event in self.all(name)])[-1]

    def until(self, name: str, seconds: float) -> None:
        """Waits for an event of a name, for the end of the process, or for so long."""
        deadline = time.monotonic() + seconds
        while not self.all(name) and self._listen(deadline):
            pass

    def end(self, seconds: float = 120, *, kill_after: float | None = None) -> str:
        """Waits for the process, "ended" or "failed"; "killed" where SIGKILL ended it, by itself or after a time.

        "hangs" if it had to be killed as `seconds` were over.
        """
        deadline = time.monotonic() + (seconds if kill_after is None else kill_after)
        while self._listen(deadline):
            pass
        late = time.monotonic() >= deadline
        if late:
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        while self._listen(time.monotonic() + 1):
            pass
        os.close(self._pipe)
        if os.WIFSIGNALED(status):
            killed = os.WTERMSIG(status) == signal.SIGKILL
            hangs = late and kill_after is None
            return ("hangs" if hangs else "killed") if killed else f"failed by signal {os.WTERMSIG(status)}"
        return "failed" if os.WEXITSTATUS(status) else "ended"

    def _listen(self, deadline: float) -> bool:
        """Takes in what was told; False once the process is gone or the time is over."""
        if not select.select([self._pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
            return False
        piece = os.read(self._pipe, 1 << 16)
        *lines, self._rest = (self._rest + piece).split(b"\n")
        self.events += [Event(*json.loads(line)) for line in lines]
        return bool(piece)
