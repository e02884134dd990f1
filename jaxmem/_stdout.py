"""Keeping standard output free of lines that libraries print."""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

_LOCK = threading.RLock()  # two threads would restore each other's descriptor


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirects file descriptor 1 to stderr, for all threads, while a library may print to it."""
    with _LOCK:
        try:
            sys.stdout.flush()
            flush_libraries()
            saved = os.dup(1)
            os.dup2(2, 1)
        except (OSError, ValueError, AttributeError):  # stdout is closed or missing
            yield
            return
        try:
            yield
        finally:
            flush_libraries()
            os.dup2(saved, 1)
            os.close(saved)


def flush_libraries() -> None:
    """Flushes the buffers of C's stdio."""
    with contextlib.suppress(OSError, TypeError, AttributeError):  # platforms without it
        ctypes.CDLL(None).fflush(None)
