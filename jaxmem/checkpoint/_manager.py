"""`Manager`: the checkpoints of one run, in one folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import orbax.checkpoint

from jaxmem._installed import version
from jaxmem.checkpoint import _manifest
from jaxmem.checkpoint._leaves import described, named_leaves, storable, to_nested
from jaxmem.checkpoint._manifest import Checkpoint
from jaxmem.checkpoint._match import Reading, match
from jaxmem.checkpoint._read import read
from jaxmem.checkpoint._windows import window_facts


class Manager:
    """Checkpoints in a folder; used as a context.

    Args:
      folder: a path; made with the first save.
      keep: how many of the newest stay.
    """

    def __init__(self, folder, *, keep: int | None = 3):
        self.folder, self.keep = Path(folder).absolute(), keep

    def __enter__(self) -> "Manager":
        return self

    def __exit__(self, *_) -> None:
        self.wait()

    def save(
        self,
        state: Any,
        *,
        number: int,
        record: Mapping | None = None,
        metrics: Mapping | None = None,
        optimizer: Any = None,
    ) -> None:
        """Saves a pytree; `optimizer` is asked how many micro-steps a window of `multi_steps` has."""
        leaves = named_leaves(state)
        path = self.folder / str(number)
        data = {name: storable(leaf, name) for name, leaf in leaves.items()}
        data = {name: leaf for name, leaf in data.items() if leaf.size}
        path.mkdir(parents=True)
        if data:  # Orbax refuses an empty tree
            with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
                checkpointer.save(path / "state", to_nested(data))
        _manifest.write(
            path,
            number=number,
            leaves={name: described(leaf, name) for name, leaf in leaves.items()},
            mid_window=window_facts(state, optimizer),
            record=dict(record or {}),
            metrics=dict(metrics or {}),
            versions={name: version(name) for name in ("jaxmem", "jax", "flax", "optax", "orbax-checkpoint")},
        )

    def wait(self) -> None:
        """Until what was saved is on disk."""

    def latest(self) -> Checkpoint | None:
        """The newest good one."""
        return latest(self.folder)

    def restore(
        self, like: Any, checkpoint: Checkpoint | None = None, *, cast: str | Sequence[str] = (), optimizer: Any = None
    ) -> Any:
        """A pytree like `like`."""
        return restore(checkpoint or self.folder, like, cast=cast, optimizer=optimizer)


def latest(folder) -> Checkpoint | None:
    """The newest good checkpoint in a folder; None where there is none."""
    numbers = [int(path.parent.name) for path in Path(folder).glob(f"*/{_manifest.NAME}")]
    return _manifest.read(Path(folder) / str(max(numbers))) if numbers else None


def save(folder, state: Any, *, number: int, **said: Any) -> None:
    """Saves one checkpoint, and waits for it; `said` as of `Manager.save`."""
    with Manager(folder, keep=None) as manager:
        manager.save(state, number=number, **said)


def restore(where, like: Any, *, cast: str | Sequence[str] = (), optimizer: Any = None) -> Any:
    """A pytree like `like` from a folder's newest good checkpoint, or from a `Checkpoint`."""
    checkpoint = where if isinstance(where, Checkpoint) else latest(where)
    if checkpoint is None:
        return None
    if hasattr(like, "abstract_arguments"):  # a step
        like, optimizer = like.abstract_arguments()[0], like.spec.workload.optimizer
    reading = match(
        checkpoint.leaves,
        like,
        cast=cast,
        mid_window=checkpoint.mid_window,
        optimizer=optimizer,
        where=f"checkpoint {checkpoint.path}",
    )
    return _read(checkpoint.path, reading, like)


def _read(path: Path, reading: Reading, like: Any) -> Any:
    return read(path / "state", reading, like)
