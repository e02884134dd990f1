"""`Manager`: the checkpoints of one run, in one folder; written by one run, read by anybody."""

import itertools
import math
import os
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmem import _compat
from jaxmem._blame import warn
from jaxmem._processes import Together
from jaxmem._shown import brief, one_line
from jaxmem.checkpoint import _errors, _folder, _restore
from jaxmem.checkpoint._manifest import Checkpoint
from jaxmem.checkpoint._save import Save
from jaxmem.errors import CheckpointError, CheckpointWarning, InputError

_COUNT = itertools.count()  # the same in all processes, which open the same managers in the same order


class Manager:
    """Checkpoints in a folder, which this run alone writes; best used as a context.

    `save` returns as soon as the arrays are copied from their devices; the rest is done in a thread. What goes wrong
    there is raised by the next `save`, by `wait`, or at the end of the context. An older checkpoint is deleted only
    when a newer one is complete. With several processes all of them make the same calls.

    Args:
      folder: a path; made if it is not there.
      keep: how many of the newest stay; None for all.
      keep_best: how many of the best stay besides.
      best: the metric that says which ones are best; checkpoints without it, or where it is NaN, never are.
      best_mode: "min" or "max".

    Raises:
      CheckpointError: another run writes there, it is the folder of something else, or it cannot be written.

    >>> import tempfile, jax.numpy as jnp
    >>> folder = tempfile.TemporaryDirectory()
    >>> with Manager(folder.name, keep=2) as manager:
    ...     for number in range(4):
    ...         manager.save({"w": jnp.full(3, number)}, number=number, metrics={"loss": 1 / (number + 1)})
    >>> [checkpoint.number for checkpoint in manager.checkpoints()]
    [2, 3]
    >>> manager.restore({"w": jnp.zeros(3, int)})
    {'w': Array([3, 3, 3], dtype=int32)}
    >>> folder.cleanup()
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        keep: int | None = 3,
        keep_best: int = 0,
        best: str = "loss",
        best_mode: str = "min",
    ):
        if keep is not None and (type(keep) is not int or keep < 1):
            raise InputError(wanted="keep to be 1 or more, or None for all", got=f"{keep!r}", do="Pass for example 3.")
        if type(keep_best) is not int or keep_best < 0:
            raise InputError(wanted="keep_best to be 0 or more", got=f"{keep_best!r}", do="Pass for example 1.")
        if best_mode not in ("min", "max"):
            raise InputError(wanted='best_mode to be "min" or "max"', got=f"{best_mode!r}", do='A loss has "min".')
        self.folder = _restore.absolute(folder)
        self.keep, self.keep_best, self.best, self.best_mode = keep, keep_best, best, best_mode
        self._pending: Save | None = None
        self._begins = False
        self._open()

    def __repr__(self) -> str:
        return one_line("Manager", [("folder", brief(str(self.folder))), ("keep", str(self.keep))])

    def __enter__(self) -> "Manager":
        return self

    def __exit__(self, kind, error, _) -> None:
        try:
            self.wait()
        except CheckpointError as failed:
            if error is None:
                raise
            warn(str(failed), CheckpointWarning)  # and the user's own error is shown
        finally:
            self._is_open = False
            if self._pending is None:  # else a Ctrl-C ended the wait, and the folder is still written to
                with _TURN:  # nobody looks for the lock while it is let go of
                    self._lock = None

    def save(
        self,
        state: Any,
        *,
        number: int | None = None,
        record: Mapping[str, Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        optimizer: Any = None,
    ) -> None:
        """Saves a pytree of arrays; its arrays may be donated or deleted as soon as this returns.

        Waits first for the save before, if that is not done; none is ever skipped.

        Args:
          state: arrays of JAX or NumPy, typed PRNG keys, scalars.
          number: of the checkpoint; by default `state.window`, or `state.step`.
          record: JSON to be saved with it.
          metrics: name → scalar.
          optimizer: whose state is saved; of `multi_steps` it tells how many micro-steps a window has.

        Raises:
          CheckpointError: it cannot be written, the save before could not be, or there is a good one of that number.
        """
        with _TURN:
            self._save(state, number, record or {}, metrics or {}, optimizer)

    def _save(self, state, number, record, metrics, optimizer) -> None:
        self.wait()
        if not self._is_open:
            self._open()
        self._others_finish()
        if self._begins:
            got = "one in the middle of another's beginning, as by a handler of a signal"
            do = "Let the handler only tell the loop, which saves between two steps."
            raise CheckpointError(wanted="one save after the other", got=got, do=do)
        self._begins = True
        try:
            self._begin(state, number, record, metrics, optimizer)
        finally:
            self._begins = False

    def _begin(self, state, number, record, metrics, optimizer) -> None:
        path, count = self.folder / str(_number(state, number)), next(self._saves)
        together = Together(f"{self._name}/save/{count}")
        together.forget(f"{self._name}/save/{count - 2}")  # all have left it, or the one before had no end
        told = {"record": record, "metrics": metrics, "optimizer": optimizer}
        self._pending = Save(path, state, **told, together=together, afterwards=lambda: self._retain(path))
        self._pending.start()

    def wait(self) -> None:
        """Waits until what was saved is complete on disk.

        Raises:
          CheckpointError: it could not be saved; no older checkpoint was deleted.
        """
        while (pending := self._pending) is not None:
            pending.wait_until_done()
            if self._pending is pending:  # and not what a handler of a signal has saved meanwhile
                self._pending = None
            if pending.error is not None:
                raise pending.error

    def latest(self) -> Checkpoint | None:
        """The newest good checkpoint; see `jaxmem.checkpoint.latest`."""
        self.wait()
        return _restore.latest(self.folder)

    def checkpoints(self) -> list[Checkpoint]:
        """Those that are complete by their manifests, the oldest first; whether files are damaged is not looked at."""
        self.wait()
        return _restore.listed(self.folder)

    def restore(
        self,
        like: Any,
        checkpoint: Checkpoint | None = None,
        *,
        only: str = "",
        cast: str | Sequence[str] = (),
        optimizer: Any = None,
    ) -> Any:
        """A pytree like `like` from a checkpoint, by default the newest good one; see `jaxmem.checkpoint.restore`."""
        self.wait()
        where = self.folder if checkpoint is None else checkpoint
        return _restore.restore(where, like, only=only, cast=cast, optimizer=optimizer)

    def _open(self) -> None:
        """Takes the folder for this run, and removes what saves that did not end have left there."""
        with _TURN:
            self._name, self._saves = f"manager/{next(_COUNT)}", itertools.count()
            self._others_finish()
            left = Together(f"{self._name}/open").first_does(self._take)
            self._is_open = True
            _OPEN.add(self)
        for number in left if jax.process_index() == 0 else ():
            text = f"removed checkpoint {number} of {self.folder}, whose save was not finished"
            warn(text, CheckpointWarning)

    def _others_finish(self) -> None:
        """Waits for what other managers of this process write there: it must not be taken for a save without an end."""
        for manager in list(_OPEN):
            if (pending := manager._pending) is not None and manager.folder.resolve() == self.folder.resolve():
                pending.wait_until_done()  # its error is for its own manager

    def _take(self) -> list[int]:
        try:
            _folder.check(self.folder)
            self.folder.mkdir(parents=True, exist_ok=True)
            self._lock = _lock(self.folder)
            return _folder.remove_unfinished(self.folder)
        except OSError as error:
            raise _errors.explained(error, "a folder to save checkpoints in", self.folder) from error

    def _retain(self, newest: Path) -> None:
        """Deletes what is neither among the newest nor among the best; what is known as damaged does not count."""
        if self.keep is None:
            return
        there = [each for each in _restore.listed(self.folder) if each.path not in _restore.DAMAGED]
        sign = 1 if self.best_mode == "min" else -1
        rated = [each for each in there if not math.isnan(each.metrics.get(self.best, math.nan))]
        rated.sort(key=lambda each: (sign * each.metrics[self.best], -each.number))
        stay = {newest} | {each.path for each in there[-self.keep :] + rated[: self.keep_best]}
        for checkpoint in there:
            if checkpoint.path not in stay:
                _folder.remove(checkpoint.path)


def save(
    folder: str | Path,
    state: Any,
    *,
    number: int | None = None,
    record: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    optimizer: Any = None,
) -> None:
    """Saves one checkpoint, and waits until it is complete; none is deleted. See `Manager.save`.

    >>> import tempfile, jax.numpy as jnp
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(folder, {"w": jnp.ones(3)}, number=7)
    ...     _restore.latest(folder)
    <Checkpoint number=7 ...>
    """
    with Manager(folder, keep=None) as manager:
        manager.save(state, number=number, record=record, metrics=metrics, optimizer=optimizer)


_OPEN: "weakref.WeakSet[Manager]" = weakref.WeakSet()
_TURN = threading.RLock()  # of the threads of one process, one begins a save
_LOCKS: "weakref.WeakValueDictionary[Path, _folder.Lock]" = weakref.WeakValueDictionary()


def _lock(folder: Path) -> _folder.Lock:
    """The lock of a folder; managers of one process share it, since a cell of a notebook is run again and again."""
    found = _LOCKS.get(folder.resolve())
    if found is None:
        found = _LOCKS[folder.resolve()] = _folder.Lock(folder)
    return found


def _finish_all() -> None:
    """What is pending when the interpreter ends is finished; an error that nobody waited for is told."""
    for manager in list(_OPEN):
        try:
            manager.wait()
        except CheckpointError as error:
            print(f"jaxmem: {error}", file=sys.stderr)


_compat.before_threads_end(_finish_all)


def _after_fork() -> None:
    """A child has none of the threads that write, and none of the locks: it is another run."""
    global _TURN
    _TURN = threading.RLock()
    for manager in list(_OPEN):
        manager._pending, manager._is_open, manager._lock = None, False, None
    _OPEN.clear()
    _LOCKS.clear()


os.register_at_fork(after_in_child=_after_fork)


def _number(state: Any, number: Any) -> int:
    if number is None:
        number = getattr(state, "window", getattr(state, "step", None))
    try:
        array = np.asarray(number)
        found = int(array) if array.dtype.kind in "iu" and not array.shape else -1
    except (TypeError, ValueError, RuntimeError):  # traced, or deleted
        found = -1
    if found < 0:
        raise CheckpointError(
            wanted="the number of the checkpoint, 0 or more",
            got="none, and a state without `window` or `step`" if number is None else f"{number!r}",
            do="Pass number=, such as the count of steps so far.",
        )
    return found
