"""Reads a tree from Orbax's files: each leaf by its shards, straight to where and in the dtype it is wanted."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint

from jaxmem.checkpoint._leaves import Leaf, described, from_nested, is_number, named_leaves, to_nested
from jaxmem.checkpoint._match import Reading


def read(path: Path, reading: Reading, like: Any) -> Any:
    """The tree that `reading` says how to find.

    Args:
      path: of Orbax's folder.
      reading: of `match`, of this checkpoint and `like`.
      like: a pytree. A leaf with a sharding comes in it. A `ShapeDtypeStruct` without one and an array that is not
        committed come on the default device, not committed; a NumPy array or a number as what it is.
    """
    leaves = named_leaves(like)
    first = {}  # source → the leaf that it is read as; where it is wanted again, that one is copied
    for name, source in reading.sources.items():
        first.setdefault(source, name)
    arguments = {
        source: _restored_as(leaves[name], reading.leaves[name], described(leaves[name]))
        for source, name in first.items()
    }
    data = {}
    if arguments:  # Orbax refuses an empty tree
        with orbax.checkpoint.Checkpointer(orbax.checkpoint.PyTreeCheckpointHandler()) as checkpointer:
            args = orbax.checkpoint.args.PyTreeRestore(
                item=to_nested(dict.fromkeys(arguments, 0)), restore_args=to_nested(arguments), partial_restore=True
            )
            data = from_nested(checkpointer.restore(path, args=args))
    values = []
    for name, leaf in leaves.items():
        want, source = described(leaf), reading.sources.get(name)
        if source is None:
            value = _zeros(leaf, want)
        elif first[source] == name:
            value = data[source]
        else:
            value = _placed(np.asarray(data[source]), leaf)
        weak = source is not None and reading.leaves[name].weak
        values.append(_as_wanted(value, leaf, want, weak=weak))
    return jax.tree.structure(like).unflatten(values)


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
