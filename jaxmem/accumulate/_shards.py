"""Local accumulation: every shard of a batch adds up its own gradients, and they are reduced once."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem.accumulate import _reduce
from jaxmem.accumulate._split import Split
from jaxmem.errors import BatchError, ConfigError
from jaxmem.objective import Max, Sum, WeightedMean


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shards:
    """The mesh axes that a batch is sharded over, and the reductions between its shards.

    Args:
      axes: names of the mesh axes; empty if the batch is accumulated as a whole.
      count: number of shards.
      mesh: None for the mesh that is set.
    """

    axes: tuple[str, ...] = ()
    count: int = 1
    mesh: Any = None

    @classmethod
    def of(cls, data_sharding: Any, batch_axes: Any) -> "Shards":
        """The shards of a batch, from its NamedSharding or from names of axes of the mesh that is set.

        Raises:
          ConfigError: there is no mesh or no such axis, an axis is manual already, or the sharding leaves the example
            axis whole.
        """
        if data_sharding is None:
            return cls()
        current = jax.sharding.get_abstract_mesh()
        if isinstance(data_sharding, NamedSharding):
            mesh, axes = data_sharding.mesh, _example_axes(data_sharding, batch_axes)
            if dict(current.shape) == dict(mesh.shape):
                mesh = None  # use the mesh that is set: a target's, if the step is compiled for one
        else:
            mesh, axes = None, axis_names(data_sharding)
        shape = dict((current if mesh is None else mesh).shape)
        missing = [name for name in axes if name not in shape]
        if missing:
            raise ConfigError(
                wanted=f"data_sharding to name axes of the mesh ({', '.join(shape) or 'none is set'})",
                got=", ".join(map(repr, missing)),
                do="Pass a NamedSharding of the batch, or call within jax.set_mesh(mesh).",
            )
        manual = [name for name in axes if name in current.manual_axes]
        if manual:
            raise ConfigError(
                wanted="data_sharding over axes that no shard_map around this call has taken",
                got=f"{', '.join(map(repr, manual))} within a shard_map",
                do="Leave the shard_map out, or leave data_sharding out and reduce the gradients after the call.",
            )
        count = 1
        for name in axes:
            count *= shape[name]
        return cls(axes=axes, count=count, mesh=mesh) if count > 1 else cls()

    # -- reductions, within `map` ------------------------------------------------------------------

    def add(self, tree: Any) -> Any:
        """Every leaf summed over the shards."""
        return jax.lax.psum(tree, self.axes) if self.count > 1 else tree

    def reduce_metrics(self, accumulated: Any) -> Any:
        """Accumulators of metrics, each reduced over the shards by its kind; a `Last` is equal on all shards."""
        if self.count == 1:
            return accumulated

        def reduce(metric):
            if isinstance(metric, (WeightedMean, Sum)):
                return self.add(metric)
            if isinstance(metric, Max):
                return jax.tree.map(self._max, metric)
            return _reduce.of_last(metric, metric)

        return jax.tree.map(reduce, accumulated, is_leaf=_reduce.is_metric)

    def reduce_state(self, start: Any, state: Any, names: Any) -> Any:
        """The states of the shards after the batch, combined by the reduction of each leaf; keys are not changed."""
        if self.count == 1:
            return state

        def reduce(start, leaf, name):
            if is_key(leaf):
                return start
            if name in ("carry", "last"):  # equal on all shards
                return leaf
            if name == "max":
                return self._max(leaf)
            wide = leaf.astype(_reduce.sum_dtype(leaf.dtype))
            if name == "mean":
                return (self.add(wide) / self.count).astype(leaf.dtype)
            begun = jnp.asarray(start, wide.dtype)
            return (begun + self.add(wide - begun)).astype(leaf.dtype)

        return jax.tree.map(reduce, start, state, names)

    def _max(self, leaf):
        return jax.lax.pmax(leaf, self.axes)

    # -- running on every shard --------------------------------------------------------------------

    def map(self, fn: Callable, batch: Any, split: Split, *rest: Any) -> Any:
        """`fn(batch, index, *rest)` on every shard, with the shard's rows, its index, and the rest whole.

        Other axes of the mesh are left to the compiler. `fn` must return the same values on all shards.

        Args:
          split: of the whole batch.
        """
        if self.count == 1:
            return fn(batch, None, *rest)
        leaves, tree = jax.tree.flatten(batch, is_leaf=lambda x: x is None)
        specs = [PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, self._entry) for axis in split.axes]
        index = jnp.arange(self.count, dtype=jnp.uint32)
        if self._explicit:
            leaves = [self._reshard(leaf, axis) for leaf, axis in zip(leaves, split.axes, strict=True)]
            index = jax.sharding.reshard(index, NamedSharding(self._mesh, PartitionSpec(self._entry)))

        def on_shard(leaves, index, rest):
            return fn(tree.unflatten(leaves), index[0], *rest)

        # check_vma=False, since a loss that starts a scan from zeros would not trace with values typed by the axes they
        # vary over. Gradients are local because they are computed inside.
        mapped = jax.shard_map(
            on_shard,
            mesh=self.mesh,
            in_specs=(specs, PartitionSpec(self._entry), PartitionSpec()),
            out_specs=PartitionSpec(),
            axis_names=set(self.axes),
            check_vma=False,
        )
        return jax.jit(mapped)(leaves, index, rest)  # without jit, shard_map leaves no axis to the compiler

    @property
    def _entry(self) -> Any:
        return self.axes[0] if len(self.axes) == 1 else self.axes

    @property
    def _mesh(self) -> Any:
        return jax.sharding.get_abstract_mesh() if self.mesh is None else self.mesh

    @property
    def _explicit(self) -> bool:
        types = dict(zip(self._mesh.axis_names, self._mesh.axis_types, strict=True))
        return any(types[name] == AxisType.Explicit for name in self.axes)

    def _reshard(self, leaf: Any, axis: int | None) -> Any:
        """The leaf with a type that says its rows are sharded; splitting the rows of a whole leaf moves nothing."""
        if leaf is None or axis is None:
            return leaf
        spec = list(getattr(jax.typeof(leaf).sharding, "spec", ()))
        spec += [None] * (axis + 1 - len(spec))
        if spec[axis] not in (None, self._entry):
            raise BatchError(
                wanted=f"a batch whose rows are sharded over {self._entry!r}",
                got=f"rows sharded over {spec[axis]!r}",
                do="Give the batch the sharding that data_sharding names.",
            )
        spec[axis] = self._entry
        return jax.sharding.reshard(leaf, NamedSharding(self._mesh, PartitionSpec(*spec)))


def is_key(leaf: Any) -> bool:
    """Whether a leaf is a typed PRNG key, or an array of keys."""
    return jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key)


def shard_state(state: Any, index: Any) -> Any:
    """The state as one shard sees it: keys with its index folded in, so that shards draw different numbers."""
    if index is None:
        return state
    return jax.tree.map(lambda leaf: _fold(leaf, index) if is_key(leaf) else leaf, state)


def shard_key(rng: Any, index: Any) -> Any:
    """The step's key with the shard's index folded in."""
    return rng if rng is None or index is None else jax.random.fold_in(rng, index)


def _fold(keys, index):
    fold = jax.random.fold_in
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(keys, index)


def axis_names(value: Any) -> tuple[str, ...]:
    """One or several names of mesh axes as a tuple; ConfigError for anything else."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise ConfigError(
            wanted="data_sharding to be a NamedSharding of the batch, or names of mesh axes",
            got=repr(value),
            do='For example data_sharding="data" within jax.set_mesh(mesh).',
        )
    return tuple(names)


def _example_axes(sharding: NamedSharding, batch_axes: Any) -> tuple[str, ...]:
    """Names of the mesh axes that the rows are sharded over."""
    sharded = [axis for axis, entry in enumerate(sharding.spec) if entry is not None]
    counted = isinstance(batch_axes, int) and batch_axes >= 0  # a negative axis needs the rank, which is not known here
    axis = batch_axes if counted else sharded[0] if len(sharded) == 1 else None
    if axis not in sharded:
        raise ConfigError(
            wanted="data_sharding to shard the batch along its example axis",
            got=f"{sharding.spec} with batch_axes={batch_axes!r}",
            do='Pass for example NamedSharding(mesh, PartitionSpec("data")), or the names of the axes.',
        )
    return axis_names(sharding.spec[axis])
