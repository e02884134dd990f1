"""Arrays to disk and back, by Orbax. Imported when it is first needed: Orbax takes a second to load."""

import contextlib
import logging
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint

from jaxmem.checkpoint._together import Together

# One call of Orbax takes some ms, whatever it reads; what one call reads is in memory twice for a moment.
_GROUP_BYTES = 256 * 2**20


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
    checkpointer.save(path, args=orbax.checkpoint.args.PyTreeSave(nested(arrays)))
    return checkpointer


def read(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[tuple[str, jax.Array]]:
    """(name, array) of what is wanted, each read straight into its sharding.

    Args:
      path: that was saved to.
      wanted: name → shape, dtype and sharding.
    """
    with orbax.checkpoint.Checkpointer(orbax.checkpoint.PyTreeCheckpointHandler()) as checkpointer:
        for group in _groups(wanted):
            args = {
                name: orbax.checkpoint.ArrayRestoreArgs(
                    sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
                )
                for name, leaf in group.items()
            }
            values = checkpointer.restore(
                path,
                args=orbax.checkpoint.args.PyTreeRestore(
                    item=nested(group), restore_args=nested(args), partial_restore=True
                ),
            )
            for name in group:
                yield name, _taken(values, name)


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Names cut at their slashes.

    >>> nested({"params/dense/kernel": 1, "params/dense/bias": 2})
    {'params': {'dense': {'kernel': 1, 'bias': 2}}}
    """
    tree = {}
    for name, leaf in leaves.items():
        *parents, last = name.split("/")
        inner = tree
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = leaf
    return tree


def _taken(tree: dict, name: str) -> Any:
    """The leaf of a name, which the tree no longer holds, so that it is freed where its reader lets it go."""
    *parents, last = name.split("/")
    for parent in parents:
        tree = tree[parent]
    return tree.pop(last)


def _groups(wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[dict[str, jax.ShapeDtypeStruct]]:
    group, size = {}, 0
    for name, leaf in wanted.items():
        nbytes = leaf.size * leaf.dtype.itemsize
        if group and size + nbytes > _GROUP_BYTES:
            yield group
            group, size = {}, 0
        group[name] = leaf
        size += nbytes
    if group:
        yield group


class _Quiet(logging.Filter):
    """Keeps from the terminal what Orbax logs while jaxmem uses it: jaxmem says what matters by itself."""

    def __init__(self):
        super().__init__()
        self._lock, self._users = threading.Lock(), 0

    def filter(self, record: logging.LogRecord) -> bool:
        return not self._users or "/orbax/" not in record.pathname.replace("\\", "/")

    def add(self, users: int) -> None:
        with self._lock:
            self._users += users


_QUIET = _Quiet()
logging.getLogger("absl").addFilter(_QUIET)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Within it Orbax logs nothing; nor after an error, since threads it left behind log on."""
    _QUIET.add(1)
    yield
    _QUIET.add(-1)
