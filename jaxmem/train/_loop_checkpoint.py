"""What a training loop restores and saves, and what it says of that."""

import contextlib
import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxmem._blame import named
from jaxmem._processes import say
from jaxmem._status import stages
from jaxmem.checkpoint import Checkpoint, Manager
from jaxmem.errors import CheckpointError, JaxmemError
from jaxmem.train._loop_data import Batches
from jaxmem.train._record import changes, record_of, step_of


class Checkpoints:
    """The checkpoints of one loop; without a `checkpoint` nothing is restored, nothing saved and nothing said.

    Used as a context: whatever ends training, a save that is under way is completed first, and an error says which
    checkpoint is the last.

    Args:
      checkpoint: a Manager, or a folder.
      step: what trains; after `start` with the remat decision of what was restored.
      every: windows between two saves.
      cast: of `Manager.restore`.
      shown: whether to show what takes long.
    """

    def __init__(self, checkpoint: Any, step: Any, *, every: int, cast: str | Sequence[str] = (), shown: bool = True):
        self._manager = None if checkpoint is None else manager_of(checkpoint)
        self._is_ours = self._manager is not checkpoint
        self.step, self._every, self._cast, self._shown = step, every, cast, shown
        self._saved = 0
        self.restored: Checkpoint | None = None

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind, error, traceback) -> None:
        if self._manager is None:
            return
        try:
            with self._stages(f"saving window {self._saved}"):
                if self._is_ours:
                    self._manager.__exit__(kind, error, traceback)
                else:  # its owner closes it
                    self._manager.wait()
        except Exception as failed:
            if error is None:
                raise
            if failed is not error:
                say(f"the checkpoint of window {self._saved} was not completed: {named(failed)}")
        if error is not None:
            self._tell_last(error)

    def start(self, state: Any) -> Any:
        """The state to go on from: that of the newest good checkpoint, else the one that was given.

        Args:
          state: a state, whose arrays are deleted where one is restored; a function that makes one; None for the
            step's `init`.
        """
        make = _maker(self.step, state)
        with self._stages("looking for checkpoints" if self._manager else "initialising") as stage:
            found = None
            if self._manager is not None:
                importlib.import_module("orbax.checkpoint")  # in the first save its time and memory would be training's
                found = self._manager.latest()
            if found is None or self._manager is None:
                if self._manager is not None and self._shown:
                    say(f"no checkpoint in {self._manager.folder} yet; one is saved every {self._every} windows")
                stage("initialising")
                return state if make is None else make()
            stage(f"restoring {found.path}")
            self.step = step_of(found.record, self.step)
            if hasattr(self.step, "abstract_arguments"):
                like = self.step
            else:
                like = jax.tree.map(_described, state) if make is None else jax.eval_shape(make)
            if make is None:
                self._check_given(state, found, like)
                _delete(state)
            restored = self._manager.restore(like, found, cast=self._cast)
        if int(restored.window) != found.number:  # later windows would be saved under smaller numbers, and not be found
            raise CheckpointError(
                wanted=f"the state after window {found.number} in {found.path}",
                got=f"the one after window {int(restored.window)}, saved under another number",
                do="Restore it with jaxmem.checkpoint.restore, and go on from there in another folder.",
            )
        self.restored, self._saved = found, found.number
        different = changes(found.record, found.versions, self.step)
        say(f"resumed at window {found.number} from {found.path}" + (f" ({', '.join(different)})" * bool(different)))
        return restored

    def _check_given(self, state: Any, found: "Checkpoint", like: Any) -> None:
        """Raises before the arrays of a state are deleted that is worth keeping."""
        from jaxmem.checkpoint._restore import fitting

        fitting(found, like, cast=self._cast)
        is_alive = not (isinstance(state.window, jax.Array) and state.window.is_deleted())
        if is_alive and int(state.window) > found.number:
            raise CheckpointError(
                wanted="a state that is not ahead of the newest checkpoint, from which training goes on",
                got=f"one of window {int(state.window)}, and checkpoint {found.path}",
                do="To go back there, pass a function, such as step.init; to go on from the state, save it there first "
                "(jaxmem.checkpoint.save), or choose another folder.",
            )

    @property
    def position(self) -> Mapping[str, Any] | None:
        """Where the data stood when what was restored was saved; None if nothing was."""
        return None if self.restored is None else self.restored.record.get("data", {})

    def due(self, window: int) -> bool:
        """Whether the state after `window` is to be saved."""
        return self._manager is not None and (window + 1) % self._every == 0

    def save(self, window: int, state: Any, batches: Batches, metrics: Mapping[str, Any]) -> None:
        """Saves the state after `window`, once; returns when its arrays are copied from the device."""
        if self._manager is None or self._saved == window + 1:
            return
        numbers = {name: x for name, x in metrics.items() if isinstance(x, float) and math.isfinite(x)}
        numbers.pop("seconds", None)
        record = record_of(self.step, batches.position())
        self._saved = window + 1
        optimizer = getattr(getattr(self.step, "workload", None), "optimizer", None)
        self._manager.save(state, number=self._saved, record=record, metrics=numbers, optimizer=optimizer)

    def finish(self) -> Checkpoint | None:
        """Waits until all is saved; the newest checkpoint."""
        if self._manager is None:
            return None
        with self._stages(f"saving window {self._saved}"):
            self._manager.wait()
        return _newest(self._manager)

    def _tell_last(self, error: BaseException) -> None:
        with contextlib.suppress(JaxmemError, OSError):  # the error under way matters more
            last = _newest(self._manager)
            if last is None:
                return
            told = f"last checkpoint is that of window {last.number}, {last.path}."
            if isinstance(error, JaxmemError):
                if str(last.path) not in str(error):
                    error.__init__(wanted=error.wanted, got=error.got, do=f"{error.do} The {told}")
            else:
                say(f"the {told}")

    def _stages(self, first: str):
        return stages(first) if self._shown else contextlib.nullcontext(lambda stage: None)


def manager_of(checkpoint: Any, **options) -> Any:
    """A Manager as it is; one for a folder, with options.

    Raises:
      CheckpointError: it is neither, or a URL.
    """
    if hasattr(checkpoint, "save"):
        return checkpoint
    if not isinstance(checkpoint, (str, Path)) or not str(checkpoint):
        raise CheckpointError(
            wanted="checkpoint to be a jaxmem.checkpoint.Manager or a folder",
            got=repr(checkpoint) if isinstance(checkpoint, str) else f"a {type(checkpoint).__name__}",
            do='Write train_loop(..., checkpoint="checkpoints").',
        )
    return Manager(checkpoint, **options)


def newest_record(manager: Any) -> Mapping[str, Any]:
    """The record of a Manager's newest checkpoint, which is not verified; empty where there is none."""
    newest = _newest(manager)
    return {} if newest is None else newest.record


def _newest(manager: Any) -> Checkpoint | None:
    return max(manager.checkpoints(), key=lambda checkpoint: checkpoint.number, default=None)


def _maker(step: Any, state: Any) -> Callable[[], Any] | None:
    """The function that makes a state, where `state` is none itself."""
    if state is None:
        return step.init
    return state if callable(state) and not hasattr(state, "window") else None


def _described(leaf: Any) -> jax.ShapeDtypeStruct:
    array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=getattr(leaf, "sharding", None))


def _delete(state: Any) -> None:
    """Frees the arrays of a state, so that a second one has room."""
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not leaf.is_deleted():
            leaf.delete()
