"""`Manager`: the checkpoints of one run, in one folder."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint

from jaxmem._installed import version
from jaxmem.checkpoint import _manifest
from jaxmem.checkpoint._leaves import described, named_leaves
from jaxmem.checkpoint._manifest import Checkpoint


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
        """Saves a pytree."""
        leaves = named_leaves(state)
        path = self.folder / str(number)
        data = {n: jax.random.key_data(x) if described(x).key else x for n, x in leaves.items()}
        with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
            checkpointer.save(path / "state", data)
        _manifest.write(
            path,
            number=number,
            leaves={name: described(leaf) for name, leaf in leaves.items()},
            record=dict(record or {}),
            metrics=dict(metrics or {}),
            versions={name: version(name) for name in ("jaxmem", "jax", "flax", "optax", "orbax-checkpoint")},
        )

    def wait(self) -> None:
        """Until what was saved is on disk."""

    def latest(self) -> Checkpoint | None:
        """The newest good one."""
        return latest(self.folder)

    def checkpoints(self) -> list[Checkpoint]:
        """Those that are complete by their manifest."""
        return [_manifest.read(path.parent) for path in self.folder.glob(f"*/{_manifest.NAME}")]

    def restore(self, like: Any, checkpoint: Checkpoint | None = None, *, cast: Sequence[str] = ()) -> Any:
        """A pytree like `like`."""
        return restore(checkpoint or self.folder, like, cast=cast)


def latest(folder) -> Checkpoint | None:
    """The newest good checkpoint in a folder; None where there is none."""
    numbers = [int(path.parent.name) for path in Path(folder).glob(f"*/{_manifest.NAME}")]
    return _manifest.read(Path(folder) / str(max(numbers))) if numbers else None


def save(folder, state: Any, *, number: int, record: Mapping | None = None, metrics: Mapping | None = None) -> None:
    """Saves one checkpoint, and waits for it."""
    with Manager(folder, keep=None) as manager:
        manager.save(state, number=number, record=record, metrics=metrics)


def restore(where, like: Any, *, cast: Sequence[str] = ()) -> Any:
    """A pytree like `like` from a folder's newest good checkpoint, or from a `Checkpoint`."""
    checkpoint = where if isinstance(where, Checkpoint) else latest(where)
    if checkpoint is None:
        return None
    if hasattr(like, "abstract_arguments"):  # a step
        like = like.abstract_arguments()[0]
    leaves = named_leaves(like)

    def wanted(leaf):
        if described(leaf).key:
            return orbax.checkpoint.ArrayRestoreArgs(sharding=None)
        return orbax.checkpoint.ArrayRestoreArgs(
            sharding=getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0]),
            global_shape=leaf.shape,
            dtype=leaf.dtype,
        )

    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        data = checkpointer.restore(
            checkpoint.path / "state", restore_args={name: wanted(leaf) for name, leaf in leaves.items()}
        )
    values = [
        jax.random.wrap_key_data(data[name], impl=described(leaf).key) if described(leaf).key else data[name]
        for name, leaf in leaves.items()
    ]
    return jax.tree.structure(like).unflatten(values)
