"""One save, from a pytree to a complete checkpoint: the arrays, then the digests of their files, then the manifest."""

import contextlib
import dataclasses
import json
import logging
import platform
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxmem._blame import warn
from jaxmem._installed import version
from jaxmem._processes import Together
from jaxmem.checkpoint import _errors, _files, _folder, _manifest, _restore
from jaxmem.checkpoint._leaves import described, named_leaves, storable
from jaxmem.checkpoint._manifest import Checkpoint
from jaxmem.checkpoint._windows import window_facts
from jaxmem.errors import CheckpointError, CheckpointWarning

_LOG = logging.getLogger(__name__)


class Save(threading.Thread):
    """One save: arrays are copied from their devices when it is made, and written when it is started.

    Args:
      path: of the checkpoint; its name is the number.
      state, record, metrics, optimizer: as `Manager.save` takes them.
      together: a conversation of the processes about this save.
      afterwards: called by process 0 when the checkpoint is complete.

    Raises:
      CheckpointError: there is something to tell already.
    """

    def __init__(
        self,
        path: Path,
        state: Any,
        *,
        record: Mapping[str, Any],
        metrics: Mapping[str, Any],
        optimizer: Any,
        together: Together,
        afterwards: Callable[[], None],
    ):
        super().__init__(name=f"jaxmem-save-{path.name}")
        from jaxmem.checkpoint import _orbax  # a second to load, which who only imports jaxmem does not pay

        self.error: CheckpointError | None = None
        """What went wrong after the start; to be read when it is done."""
        self._done = threading.Event()
        self._path, self._together, self._afterwards = path, together, afterwards
        self._wanted = f"to save checkpoint {path.name}"
        leaves = named_leaves(state)
        arrays = {name: storable(leaf, name) for name, leaf in leaves.items()}
        self._checkpoint = Checkpoint(
            number=int(path.name),
            path=path,
            leaves={name: described(leaf, name) for name, leaf in leaves.items()},
            mid_window=window_facts(state, optimizer),
            record=_json(record),
            metrics=_numbers(metrics),
            versions={name: version(name) or "" for name in _manifest.PACKAGES} | {"python": platform.python_version()},
            processes=self._together.processes,
        )
        arrays = {name: array for name, array in arrays.items() if array.size}  # Orbax writes none without elements
        self._silence, self._orbax = contextlib.ExitStack(), None
        try:
            self._together.first_does(self._make_folder)
            if arrays:
                self._silence.enter_context(_orbax.quiet())  # Orbax writes, and speaks, from now on
                self._orbax = _orbax.start_saving(self._path / _folder.STATE, arrays, self._together)
        except Exception as error:
            told = self._failed(error)
            if _errors.is_device_memory(error):
                raise
            raise told from error
        finally:
            del leaves, arrays, state

    def start(self) -> None:
        try:
            super().start()
        except RuntimeError as error:  # the interpreter ends, or there are too many threads
            self._done.set()
            raise self._failed(error) from error

    def run(self) -> None:
        try:
            self._finish()
        except Exception as error:
            self.error = self._failed(error)
        finally:
            self._done.set()

    def wait_until_done(self) -> None:
        """Waits; again, if a Ctrl-C interrupted it. `join` does not: Python 3.11 then takes the thread for ended."""
        self._done.wait()

    def _finish(self) -> None:
        if self._orbax is not None:
            with self._silence, contextlib.closing(self._orbax):
                self._orbax.wait_until_finished()
        together, state = self._together, self._path / _folder.STATE
        names = together.first_does(lambda: _files.names_below(state))
        said = together.gather(_files.digests(state, names[together.process :: together.processes]))
        files = {f"{_folder.STATE}/{name}": tuple(told) for part in said for name, told in part.items()}
        together.first_does(lambda: _manifest.write(dataclasses.replace(self._checkpoint, files=files)))
        _LOG.debug("checkpoint %s is complete", self._path.name)
        self._wanted = "to delete older checkpoints"
        together.first_does(self._afterwards)

    def _make_folder(self) -> None:
        aside = _folder.make_room(self._path, _restore.verify_alone)
        if aside:
            text = f"checkpoint {self._path.name} of {self._path.parent} is damaged, and was moved to {aside.name}"
            warn(text, CheckpointWarning)
        _restore.DAMAGED.discard(self._path)
        self._path.mkdir()

    def _failed(self, error: Exception) -> CheckpointError:
        """What to tell; leftovers are removed, and other processes told."""
        meant = _errors.explained(error, self._wanted, self._path.parent)
        self._together.fail(meant)
        with contextlib.suppress(OSError):  # then the next run removes it
            if self._together.first and _folder.is_unfinished(self._path):
                _folder.remove(self._path)
        return meant


def _json(record: Mapping[str, Any]) -> dict:
    """A record as it will be read; not the caller's own, which may change while it is written."""
    try:
        return json.loads(json.dumps(dict(record)))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            wanted="a record that is JSON", got=str(error), do="Use numbers, texts, lists and dicts with texts as keys."
        ) from error


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in dict(metrics).items()}
    except (TypeError, ValueError, OverflowError) as error:
        raise CheckpointError(
            wanted="metrics to be a dict, name → number", got=str(error), do="Take the mean of an array."
        ) from error
