"""Standard output kept clean of what libraries print to it."""

import contextlib
import ctypes
import os
import sys
import threading
from collections.abc import Iterator

_ALONE = threading.RLock()  # two threads would restore one another's


@contextlib.contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Descriptor 1 is stderr's meanwhile, for a library that prints lines of its own; threads share it."""
    with _ALONE:
        try:
            sys.stdout.flush()
            flush_libraries()
            saved = os.dup(1)
            os.dup2(2, 1)
        except (OSError, ValueError, AttributeError):  # closed, or none at all
            yield
            return
        try:
            yield
        finally:
            flush_libraries()
            os.dup2(saved, 1)
            os.close(saved)


def flush_libraries() -> None:
    """Writes what C libraries printed and still hold back."""
    with contextlib.suppress(OSError, TypeError, AttributeError):  # where there is no such library
        ctypes.CDLL(None).fflush(None)
