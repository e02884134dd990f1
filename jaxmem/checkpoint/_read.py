"""Reads a tree from Orbax's files: each leaf by its shards, straight to where and in the dtype it is wanted."""

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint

from jaxmem.checkpoint._leaves import Leaf, described, from_nested, is_number, named_leaves, to_nested
from jaxmem.checkpoint._match import Reading
from jaxmem.checkpoint._own import owned

# A call of Orbax takes some ms, whatever it reads; what it reads is in memory twice for a moment. Of a state of 1.5 GB,
# read at once, that was 1.9 GB more than the state at the peak, and by 64 MiB 0.3 GB, in the same time.
_GROUP_BYTES, _GROUPS = 64 * 2**20, 32


def read(path: Path, reading: Reading, like: Any) -> Any:
    """The tree that `reading` says how to find; a leaf at a time is copied, so that a donating step reuses it.

    Args:
      path: of Orbax's folder.
      reading: of `match`, of this checkpoint and `like`.
      like: a pytree. A leaf with a sharding comes in it. A `ShapeDtypeStruct` without one and an array that is not
        committed come on the default device, not committed; a NumPy array or a number as what it is.
    """
    leaves = named_leaves(like)
    wanted = {name: described(leaf, name) for name, leaf in leaves.items()}
    readers = {}  # source → the leaves that come from it
    for name, source in reading.sources.items():
        readers.setdefault(source, []).append(name)
    values = {}

    def take(name: str, value: Any) -> None:
        values[name] = _as_wanted(value, leaves[name], wanted[name], weak=reading.leaves[name].weak)

    for name in reading.zeros:
        values[name] = _as_wanted(_zeros(leaves[name], wanted[name]), leaves[name], wanted[name], weak=False)
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
                    take(name, _placed(np.asarray(value), leaves[name]))
                take(first, value)
                del value
    return jax.tree.structure(like).unflatten([values[name] for name in leaves])


def _groups(sources: Mapping[str, Leaf]) -> Iterator[dict[str, Leaf]]:
    """Sources that are read in one call: one that is large, or as many as make a small part of all."""
    sizes = {source: leaf.size * np.dtype(leaf.stored_dtype).itemsize for source, leaf in sources.items()}
    most = max(_GROUP_BYTES * jax.process_count(), sum(sizes.values()) // _GROUPS)
    group, size = {}, 0
    for source, leaf in sources.items():
        if group and size + sizes[source] > most:
            yield group
            group, size = {}, 0
        group[source] = leaf
        size += sizes[source]
    if group:
        yield group


def _is_jax(leaf: Any) -> bool:
    """Whether a leaf is wanted as an array of JAX."""
    return isinstance(leaf, jax.Array) or hasattr(leaf, "sharding")


def _sharding(leaf: Any) -> Any:
    """Where a leaf is wanted; None where that is not said, as of an array that is not committed to its device.

    Were it committed there, it could not be used with arrays on a mesh.
    """
    return leaf.sharding if getattr(leaf, "committed", True) else None


def _restored_as(leaf: Any, have: Leaf, want: Leaf) -> orbax.checkpoint.RestoreArgs:
    dtype = np.dtype(want.stored_dtype)
    if _is_jax(leaf) and _sharding(leaf) is not None:
        return orbax.checkpoint.ArrayRestoreArgs(sharding=_sharding(leaf), global_shape=have.shape, dtype=dtype)
    return orbax.checkpoint.RestoreArgs(restore_type=np.ndarray, dtype=None if is_number(leaf) else dtype)


def _as_wanted(value: Any, leaf: Any, want: Leaf, *, weak: bool) -> Any:
    if not _is_jax(leaf):
        if is_number(leaf):
            return type(leaf)(np.asarray(value).item())
        value = np.array(value, leaf.dtype)  # the user's own, to write to
        return value[()] if isinstance(leaf, np.generic) else value
    if weak and (made := _weak(value, _sharding(leaf))).dtype == want.dtype:
        return made
    value = jnp.asarray(value)
    if value.size:
        value = owned(value)
    if want.key:
        # Under jit, or the key's data are sharded as no program's output is, and the next step is compiled twice.
        wrap = functools.partial(jax.random.wrap_key_data, impl=want.key)
        return jax.jit(wrap, out_shardings=_sharding(leaf))(value)
    return value if value.dtype == want.dtype else value.astype(want.dtype)  # what tensorstore cannot hold


def _weak(value: Any, sharding: Any) -> jax.Array:
    """A scalar of a weak type, which only JAX makes, of a number."""
    number = np.asarray(value).item()
    return jax.jit(lambda: jnp.asarray(number), out_shardings=sharding)()


def _zeros(leaf: Any, want: Leaf) -> Any:
    return _placed(np.broadcast_to(np.zeros((), want.stored_dtype), want.shape), leaf)


def _placed(value: np.ndarray, leaf: Any) -> Any:
    """A value that every process has, where the leaf is; each device gets its own part of it."""
    if not _is_jax(leaf) or (sharding := _sharding(leaf)) is None:
        return value
    return jax.make_array_from_callback(value.shape, sharding, lambda index: np.array(value[index]))
