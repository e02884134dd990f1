"""Reads a tree from Orbax's files: each leaf by its shards, straight to where and in the dtype it is wanted."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint

from jaxmem.checkpoint._leaves import Leaf, described, from_nested, is_number, named_leaves, to_nested
from jaxmem.checkpoint._match import Reading
from jaxmem.checkpoint._own import owned

# A call of Orbax takes some ms, whatever it reads; what it reads is in the host's memory twice for a moment.
_GROUP_BYTES = 256 * 2**20


def read(path: Path, reading: Reading, like: Any) -> Any:
    """The tree that `reading` says how to find; a leaf at a time is copied, so that a donating step reuses it.

    Args:
      path: of Orbax's folder.
      reading: of `match`, of this checkpoint and `like`.
      like: a pytree. A leaf with a sharding comes in it, a `ShapeDtypeStruct` without one on the first device, a NumPy
        array or a number as what it is.
    """
    leaves = named_leaves(like)
    wanted = {name: described(leaf, name) for name, leaf in leaves.items()}
    readers = {}  # source → the leaves that come from it
    for name, source in reading.sources.items():
        readers.setdefault(source, []).append(name)
    values = {
        name: _as_wanted(_zeros(leaves[name], wanted[name]), leaves[name], wanted[name]) for name in reading.zeros
    }
    with orbax.checkpoint.Checkpointer(orbax.checkpoint.PyTreeCheckpointHandler()) as checkpointer:
        for group in _groups({source: reading.leaves[names[0]] for source, names in readers.items()}):
            arguments = {
                source: _restored_as(leaves[readers[source][0]], have, wanted[readers[source][0]])
                for source, have in group.items()
            }
            args = orbax.checkpoint.args.PyTreeRestore(
                item=to_nested(dict.fromkeys(arguments, 0)), restore_args=to_nested(arguments), partial_restore=True
            )
            data = from_nested(checkpointer.restore(path, args=args))
            for source in group:
                value = data.pop(source)  # which so is freed as soon as it is copied
                first, *others = readers[source]
                for name in others:
                    copy = _placed(np.asarray(value), leaves[name])
                    values[name] = _as_wanted(copy, leaves[name], wanted[name])
                values[first] = _as_wanted(value, leaves[first], wanted[first])
                del value
    return jax.tree.structure(like).unflatten([values[name] for name in leaves])


def _groups(sources: Mapping[str, Leaf]) -> Iterator[dict[str, Leaf]]:
    """Sources that are read in one call."""
    group, size = {}, 0
    for source, leaf in sources.items():
        nbytes = leaf.size * np.dtype(leaf.stored_dtype).itemsize
        if group and size + nbytes > _GROUP_BYTES:
            yield group
            group, size = {}, 0
        group[source] = leaf
        size += nbytes
    if group:
        yield group


def _is_jax(leaf: Any) -> bool:
    """Whether a leaf is wanted as an array of JAX."""
    return isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) or hasattr(leaf, "sharding")


def _sharding(leaf: Any) -> Any:
    return getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.local_devices()[0])


def _restored_as(leaf: Any, have: Leaf, want: Leaf) -> orbax.checkpoint.RestoreArgs:
    dtype = np.dtype(want.stored_dtype)
    if _is_jax(leaf):
        return orbax.checkpoint.ArrayRestoreArgs(sharding=_sharding(leaf), global_shape=have.shape, dtype=dtype)
    return orbax.checkpoint.RestoreArgs(restore_type=np.ndarray, dtype=None if is_number(leaf) else dtype)


def _as_wanted(value: Any, leaf: Any, want: Leaf) -> Any:
    if want.key:
        return jax.random.wrap_key_data(owned(value), impl=want.key)
    if _is_jax(leaf):
        return owned(value) if value.dtype == want.dtype else value.astype(want.dtype)  # what tensorstore cannot hold
    if is_number(leaf):
        return type(leaf)(np.asarray(value).item())
    value = np.array(value, leaf.dtype)  # the user's own, to write to
    return value[()] if isinstance(leaf, np.generic) else value


def _zeros(leaf: Any, want: Leaf) -> Any:
    return _placed(np.broadcast_to(np.zeros((), want.stored_dtype), want.shape), leaf)


def _placed(value: np.ndarray, leaf: Any) -> Any:
    """A value that every process has, where the leaf is; each device gets its own part of it."""
    if not _is_jax(leaf):
        return value
    return jax.make_array_from_callback(value.shape, _sharding(leaf), lambda index: np.array(value[index]))
