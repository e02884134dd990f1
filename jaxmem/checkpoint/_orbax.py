"""Arrays to disk, by Orbax, and its silence. Imported when it is first needed: Orbax takes a second to load."""

import contextlib
import logging
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import orbax.checkpoint

from jaxmem._processes import Together
from jaxmem.checkpoint._leaves import to_nested


def start_saving(path: Path, arrays: Mapping[str, Any], together: Together) -> orbax.checkpoint.AsyncCheckpointer:
    """Copies arrays from their devices, and writes them from then on; `wait_until_finished` of the result waits.

    Args:
      path: of a folder that does not exist; its parent does.
      arrays: name → array, of JAX or of NumPy.
      together: the processes, all of which take part.
    """
    checkpointer = orbax.checkpoint.AsyncCheckpointer(
        orbax.checkpoint.PyTreeCheckpointHandler(),
        # Made beside, a folder that cannot be made is noticed by threads that wait for it for five minutes.
        async_options=orbax.checkpoint.options.AsyncOptions(
            create_directories_asynchronously=False, barrier_sync_fn=together.barrier
        ),
    )
    checkpointer.save(path, args=orbax.checkpoint.args.PyTreeSave(to_nested(arrays)))
    return checkpointer


class _Quiet(logging.Filter):
    """Keeps from the terminal what Orbax and TensorStore say while jaxmem uses them; jaxmem says what matters."""

    def __init__(self):
        super().__init__()
        self._lock, self._users, self._hook = threading.Lock(), 0, sys.unraisablehook

    def filter(self, record: logging.LogRecord) -> bool:
        at = [record.pathname]
        if record.name == "asyncio" and record.exc_info:  # of a write that fails after the one of which jaxmem tells
            at = [frame.filename for frame in traceback.extract_tb(record.exc_info[2])]
        return not self._users or not any("/orbax/" in path.replace("\\", "/") for path in at)

    def unraisable(self, told: Any) -> None:
        """Where one write fails, Orbax closes the event loop in which TensorStore would tell of the others."""
        if not (isinstance(told.exc_value, RuntimeError) and str(told.exc_value) == "Event loop is closed"):
            self._hook(told)

    def add(self, users: int) -> None:
        with self._lock:
            self._users += users
            if sys.unraisablehook != self.unraisable:
                self._hook, sys.unraisablehook = sys.unraisablehook, self.unraisable
            if not self._users:
                sys.unraisablehook = self._hook


_QUIET = _Quiet()
for _name in ("absl", "asyncio"):
    logging.getLogger(_name).addFilter(_QUIET)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within it Orbax says nothing; nor after an error, since threads and writes that it left behind go on."""
    _QUIET.add(1)
    yield
    _QUIET.add(-1)
