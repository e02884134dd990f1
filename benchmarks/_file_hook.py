"""A look at the operations on files that a process is about to do: to count them, to die at one, or to let it fail."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

# Those by which Python announces them, `sys.addaudithook`; what libraries in C++ write is not among them.
_FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.scandir", "os.listdir", "os.link"}


class FileHook:
    """Counts this process's file operations below a folder, and calls something at one of them, before it is done.

    Args:
      folder: None counts nothing.
      at: (n, action) of the n-th; what the action raises, the operation raises.
      writing: whether only operations that change something count.
    """

    def __init__(self, folder: Path | None, at: tuple[int, Callable[[], None]] | None = None, *, writing: bool = False):
        self.seen, self.at, self._prefix = 0, at, str(folder)
        self._lock, self._writing = threading.Lock(), writing
        if folder is not None:
            sys.addaudithook(self._see)

    def _see(self, event: str, args: tuple) -> None:
        if event not in _FILE_EVENTS or not args or not isinstance(args[0], (str, bytes, os.PathLike)):
            return
        if not os.fsdecode(args[0]).startswith(self._prefix) or (self._writing and not _writes(event, args)):
            return
        with self._lock:
            self.seen += 1
            now = self.at is not None and self.seen == self.at[0]
        if now and self.at is not None:
            self.at[1]()


def _writes(event: str, args: tuple) -> bool:
    if event == "open":
        return bool(args[2] & (os.O_WRONLY | os.O_RDWR))
    return event not in ("os.scandir", "os.listdir")


def die(seconds: float) -> None:
    """SIGKILL for this process, after a while."""
    if seconds <= 0:
        os.kill(os.getpid(), signal.SIGKILL)
    timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGKILL))
    timer.daemon = True
    timer.start()
