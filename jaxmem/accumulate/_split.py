"""Cutting a batch into micro-batches along each leaf's example axis."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.config import step_count
from jaxmem.errors import BatchError, ConfigError
from jaxmem.workload import is_array_like, path_string


def micro_batch(batch, index, num_micro_batches: int, *, batch_axes: Any = 0, pad: Any = None):
    """Micro-batch `index` of a batch: rows `index`, `index + K`, `index + 2K`, … of every batched leaf.

    Rows are taken with a stride, which moves nothing when the batch axis is sharded: each device slices its own
    rows, while contiguous micro-batches would have to be sent between devices.

    Args:
      batch: pytree of arrays; batched leaves agree on the size B of their example axis.
      index: which micro-batch, 0 ≤ index < K. A traced index is not checked: JAX clamps it.
      num_micro_batches: K.
      batch_axes: pytree prefix with each leaf's example axis; None passes the leaf whole.
      pad: pytree prefix with each leaf's fill value; B is then padded to a multiple of K.

    Raises:
      BatchError: K does not divide B and there is no `pad`, or leaves disagree about B.
      ConfigError: K is not a whole number of at least 1, or `index` is not one of 0 … K - 1.

    >>> import jax.numpy as jnp
    >>> micro_batch({"x": jnp.arange(6)}, 1, 3)["x"].tolist()
    [1, 4]
    """
    count = step_count(num_micro_batches, "num_micro_batches")
    _check_index(index, count)
    return Split.of(batch, count, batch_axes=batch_axes, pad=pad).take(batch, index)


def _check_index(index, count: int) -> None:
    if isinstance(index, Tracer):
        return
    whole = np.ndim(index) == 0 and jnp.issubdtype(jnp.result_type(index), jnp.integer)
    if not whole or not 0 <= int(index) < count:
        raise ConfigError(
            wanted=f"the index of a micro-batch, a whole number from 0 to {count - 1}",
            got=repr(index),
            do=f"There are num_micro_batches={count} of them.",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Split:
    """How a batch is cut into micro-batches; made and checked once, used for every index.

    Args:
      num_micro_batches: K.
      size: B, rows of the batch before padding.
      axes: for each leaf (None leaves included), its example axis or None.
      fills: for each leaf, its fill value or None.
    """

    num_micro_batches: int
    size: int
    axes: tuple[int | None, ...]
    fills: tuple[Any, ...]

    @classmethod
    def of(cls, batch, num_micro_batches: int, *, batch_axes, pad) -> "Split":
        paths_and_leaves = jax.tree_util.tree_leaves_with_path(batch, is_leaf=_is_none)
        given = zip(
            paths_and_leaves, _broadcast(batch_axes, batch, "batch_axes"), _broadcast(pad, batch, "pad"), strict=True
        )
        axes, fills, sizes, unpadded = [], [], {}, []
        for (path, leaf), axis, fill in given:
            if leaf is None or axis is None:
                axis = None
            else:
                name = path_string(path, root="batch")
                axis = _example_axis(leaf, axis, name)
                sizes[name] = leaf.shape[axis]
                if fill is None:
                    unpadded.append(name)
            axes.append(axis)
            fills.append(fill)
        size = _common_size(sizes, num_micro_batches)
        if size % num_micro_batches and unpadded:
            raise BatchError(
                wanted=f"a batch that accumulation_steps K={num_micro_batches} divides",
                got=f"B={size} rows at {unpadded[0]}",
                do=f"Use a K that divides {size}; accumulate.value_and_grad also takes `pad` fill values, for weighted "
                "objectives.",
            )
        return cls(num_micro_batches=num_micro_batches, size=size, axes=tuple(axes), fills=tuple(fills))

    @property
    def padded(self) -> bool:
        return self.size % self.num_micro_batches != 0

    def pad(self, batch):
        """The batch with fill rows appended up to a multiple of K."""
        if not self.padded:
            return batch
        missing = -self.size % self.num_micro_batches

        def grow(leaf, axis, fill):
            if axis is None:
                return leaf
            rows = jnp.full((*leaf.shape[:axis], missing, *leaf.shape[axis + 1 :]), fill, leaf.dtype)
            return jnp.concatenate([leaf, rows], axis)

        return self._map(grow, batch)

    def take(self, batch, index):
        """Micro-batch `index` of a batch, padded first where needed."""
        return self.take_padded(self.pad(batch), index)

    def take_padded(self, batch, index):
        """Micro-batch `index` of a batch that `pad` returned."""
        k = self.num_micro_batches
        if k == 1:
            return batch

        def rows(leaf, axis, _):
            if axis is None:
                return leaf
            # (…, B, …) → (…, B/K, K, …) is a view; the K axis is not sharded, so indexing it is local.
            split = _gathered(leaf, axis, k).reshape(
                *leaf.shape[:axis], leaf.shape[axis] // k, k, *leaf.shape[axis + 1 :]
            )
            return jax.lax.dynamic_index_in_dim(split, index, axis + 1, keepdims=False)

        return self._map(rows, batch)

    def _map(self, fn, batch):
        leaves, tree = jax.tree.flatten(batch, is_leaf=_is_none)
        return tree.unflatten([fn(*args) for args in zip(leaves, self.axes, self.fills, strict=True)])


def _gathered(leaf, axis: int, k: int):
    """The leaf, with its rows gathered if K does not divide its shards evenly: JAX does it for automatic axes only."""
    sharding = jax.typeof(leaf).sharding
    entry = sharding.spec[axis] if sharding.mesh.are_all_axes_explicit else None
    shards = math.prod(sharding.mesh.shape[name] for name in ((entry,) if isinstance(entry, str) else entry or ()))
    if leaf.shape[axis] // k % shards == 0:
        return leaf
    spec = PartitionSpec(*sharding.spec[:axis], None, *sharding.spec[axis + 1 :])
    return jax.sharding.reshard(leaf, NamedSharding(sharding.mesh, spec))


def _is_none(x) -> bool:
    return x is None


def _broadcast(prefix, batch, name: str) -> list:
    """One entry of the prefix for each leaf of the batch, None leaves included."""
    try:
        return jax.tree.leaves(jax.tree.broadcast(prefix, batch, is_leaf=_is_none), is_leaf=_is_none)
    except ValueError as error:
        raise BatchError(
            wanted=f"{name} to be a pytree prefix of the batch",
            got=str(error).splitlines()[0],
            do=f"Give {name} the structure of the batch, or a single value for all of its leaves.",
        ) from None


def _example_axis(leaf, axis, name: str) -> int:
    if isinstance(axis, bool) or not isinstance(axis, (int, np.integer)):
        raise BatchError(
            wanted="batch_axes made of axis numbers and None",
            got=f"{axis!r} for {name}",
            do="Give the number of that leaf's example axis, or None to pass the leaf whole.",
        )
    ndim = getattr(leaf, "ndim", 0) if is_array_like(leaf) else 0
    if not -ndim <= axis < ndim:
        shape = tuple(leaf.shape) if hasattr(leaf, "shape") else "no shape"
        raise BatchError(
            wanted=f"an example axis {axis} in every batched leaf",
            got=f"shape {shape} at {name}",
            do="Pass that leaf whole: set its entry of batch_axes to None.",
        )
    return int(axis) % ndim


def _common_size(sizes: dict[str, int], num_micro_batches: int) -> int:
    if not sizes:
        raise BatchError(
            wanted="a batch with at least one batched leaf",
            got="none",
            do="Give the batch arrays with an example axis, and batch_axes that names it.",
        )
    first, size = next(iter(sizes.items()))
    for name, other in sizes.items():
        if other != size:
            raise BatchError(
                wanted=f"all batched leaves to have the same number of rows (B={size} at {first})",
                got=f"B={other} at {name}, to be cut into K={num_micro_batches} micro-batches",
                do="Set batch_axes to None for leaves that are not batched, or correct the batch.",
            )
    if size == 0:
        raise BatchError(wanted="a batch with at least one row", got=f"B=0 at {first}", do="Check the data pipeline.")
    return size
