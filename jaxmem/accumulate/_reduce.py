"""How metrics and model state of micro-batches combine into those of the whole batch."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.errors import StateError
from jaxmem.objective import Last, Max, Sum, WeightedMean
from jaxmem.workload import check_reductions, path_string


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Values of each row, put back in the order of the batch's rows; what `aux` of a loss may hold.

    Args:
      value: of the rows of one micro-batch; as an accumulator, of those of all micro-batches, stacked.
      axis: along which rows lie.
      inner: how many neighbours along it belong to one row.
      index: of the next micro-batch, in an accumulator.
    """

    value: Any
    index: Any = 0
    axis: int = dataclasses.field(default=0, metadata={"static": True})
    inner: int = dataclasses.field(default=1, metadata={"static": True})

    def ordered(self):
        """The values of the accumulator in the order of the rows: micro-batch i of K holds rows i, i + K, …"""
        count, *shape = self.value.shape
        split = [count, *shape[: self.axis], shape[self.axis] // self.inner, self.inner, *shape[self.axis + 1 :]]
        moved = jnp.moveaxis(self.value.reshape(split), 0, self.axis + 1)
        return moved.reshape([*shape[: self.axis], shape[self.axis] * count, *shape[self.axis + 1 :]])


_KINDS = (WeightedMean, Sum, Max, Last, Rows)


def is_metric(x) -> bool:
    """Whether a value says how micro-batches combine: `WeightedMean`, `Sum`, `Max`, `Last`, `Rows`."""
    return isinstance(x, _KINDS)


def init_metrics(shapes, count: int = 1):
    """Accumulators for metrics of these shapes over `count` micro-batches: maxima start at the lowest value."""

    def init(metric):
        if isinstance(metric, WeightedMean):  # integers are added as floats, which do not overflow
            dtype = jnp.promote_types(jnp.result_type(metric.total, metric.weight), jnp.float32)
            return jax.tree.map(lambda s: jnp.zeros(s.shape, dtype), metric)
        if isinstance(metric, Sum):
            return jax.tree.map(lambda s: jnp.zeros(s.shape, sum_dtype(s.dtype)), metric)
        if isinstance(metric, Max):
            return jax.tree.map(lambda s: jnp.full(s.shape, _lowest(s.dtype), s.dtype), metric)
        if isinstance(metric, Rows):
            stacked = jnp.zeros((count, *metric.value.shape), metric.value.dtype)
            return dataclasses.replace(metric, value=stacked, index=jnp.zeros((), jnp.int32))
        return of_last(metric, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), metric))

    return jax.tree.map(init, shapes, is_leaf=is_metric)


def of_last(metric, value):
    """`value`, for a `Last`; a kind of metric that this module was not taught is no `Last`."""
    if not isinstance(metric, Last):
        raise NotImplementedError(f"how micro-batches of a {type(metric).__name__} combine")
    return value


def add_metrics(accumulated, new):
    """Adds one micro-batch's metrics to the accumulators."""

    def add(old, new):
        if isinstance(old, (WeightedMean, Sum)):
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), old, new)
        if isinstance(old, Max):
            return jax.tree.map(jnp.maximum, old, new)
        if isinstance(old, Rows):
            value = jax.lax.dynamic_update_index_in_dim(old.value, new.value, old.index, 0)
            return dataclasses.replace(old, value=value, index=old.index + 1)
        return of_last(old, new)

    return jax.tree.map(add, accumulated, new, is_leaf=is_metric)


def finish_metrics(accumulated):
    """Plain arrays: total / weight for a `WeightedMean` (0 where the weight is 0), the value for others."""

    def finish(metric):
        if isinstance(metric, Rows):
            return metric.ordered()
        return mean(metric.total, metric.weight) if isinstance(metric, WeightedMean) else metric.value

    return jax.tree.map(finish, accumulated, is_leaf=is_metric)


def mean(total, weight):
    """total / weight in at least float32; 0 where the weight is 0, with a gradient of 0."""
    weight = jnp.asarray(weight, sum_dtype(jnp.float32 if weight is None else jnp.result_type(weight)))
    empty = weight == 0
    return jnp.where(empty, 0, total / jnp.where(empty, 1, weight))


def sum_dtype(dtype):
    """The dtype in which values of `dtype` are summed: at least float32 for floats, int32 for bools."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return jnp.promote_types(dtype, jnp.float32)
    return jnp.promote_types(dtype, jnp.int32)


def accumulator_dtype_of(leaf, dtype):
    """The dtype in which a leaf's gradients are added up: `dtype`, or the leaf's own if it is wider.

    A `dtype` of less than 32 bits is used even for wider leaves: it is never a default, so the user asked for it.
    Complex for a complex leaf.
    """
    own = jnp.result_type(leaf)
    if jnp.finfo(dtype).bits >= 32:
        return jnp.promote_types(own, dtype)
    return jnp.promote_types(dtype, jnp.complex64) if jnp.issubdtype(own, jnp.complexfloating) else jnp.dtype(dtype)


def state_reductions(reduction, state):
    """One reduction name per leaf of the state; StateError for an unknown name."""
    try:
        names = jax.tree.broadcast(reduction, state)
    except ValueError as error:
        raise StateError(
            wanted="state_reduction to be a pytree prefix of the state",
            got=str(error).splitlines()[0],
            do="Give one name per collection, e.g. {'batch_stats': 'carry', 'amax': 'max'}.",
        ) from None
    check_reductions(names)
    check_reductions(reduction)  # also if there is no state
    leaves = zip(jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(names), strict=True)
    for (path, leaf), name in leaves:
        where = path_string(path, root="state")
        dtype = jnp.result_type(leaf)
        if not _reducible(name, dtype):
            raise StateError(
                wanted=f"a leaf whose dtype the state reduction {name!r} can combine",
                got=f"{dtype} at {where}",
                do="Choose 'carry' or 'last' for that leaf, or another reduction that fits it.",
            )
    return names


def _reducible(name: str, dtype) -> bool:
    if name in ("mean", "sum"):
        return jnp.issubdtype(dtype, jnp.inexact if name == "mean" else jnp.number)
    return name != "max" or not jnp.issubdtype(dtype, jax.dtypes.prng_key)


def init_state(state, names):
    """The accumulator of each state leaf, in the leaf's dtype, or a wider one for sums and means."""

    def init(leaf, name):
        if name in ("mean", "sum"):
            return jnp.zeros(jnp.shape(leaf), sum_dtype(jnp.result_type(leaf)))
        return jnp.asarray(leaf)

    return jax.tree.map(init, state, names)


def seen_state(state, accumulated, names):
    """The state that the next micro-batch sees: the current value of carried leaves, the initial value of others."""
    return jax.tree.map(lambda leaf, acc, name: acc if name == "carry" else leaf, state, accumulated, names)


def add_state(state, accumulated, new, names, is_first):
    """Combines one micro-batch's new state with the accumulators."""

    def add(start, acc, new, name):
        if name == "mean":
            return acc + new.astype(acc.dtype)
        if name == "sum":  # add the increment over the initial value
            return acc + (new.astype(acc.dtype) - jnp.asarray(start, acc.dtype))
        if name == "max":
            return jnp.where(is_first, new, jnp.maximum(acc, new))
        return new

    return jax.tree.map(add, state, accumulated, new, names)


def finish_state(state, accumulated, names, num_micro_batches: int):
    """The state after the whole batch, in its original dtypes."""

    def finish(leaf, acc, name):
        if name == "mean":
            return (acc / num_micro_batches).astype(jnp.result_type(leaf))
        if name == "sum":
            return (acc + jnp.asarray(leaf, acc.dtype)).astype(jnp.result_type(leaf))
        return acc

    return jax.tree.map(finish, state, accumulated, names)


def _lowest(dtype):
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf
    return False if dtype == jnp.bool_ else jnp.iinfo(dtype).min
