"""The loop over micro-batches: one `lax.scan` whose carry holds the accumulators."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.accumulate import _reduce
from jaxmem.accumulate._in_place import Added, GradientSum
from jaxmem.accumulate._scan import scan
from jaxmem.accumulate._trace import MicroLoss


def add_up(
    objective: Callable,
    params: Any,
    state: Any,
    *,
    take: Callable,
    key_of: Callable,
    count: int,
    shapes: MicroLoss,
    state_names: Any,
    accumulator_dtype: Any,
    in_place: bool | None = None,
) -> tuple[jax.Array, Any, Any, Any, Added]:
    """Value, gradients, metrics and state of the micro-batches together, and how gradients were added up.

    Args:
      objective: (params, batch, key, state) -> (what is differentiated, (value, MicroLoss)).
      take: index -> micro-batch.
      key_of: index -> the micro-batch's PRNG key.
      count: of micro-batches.
      shapes: of one micro-batch's outputs.
      state_names: the reduction of each leaf of the state.
      accumulator_dtype: as in `value_and_grad`.
      in_place: see `GradientSum`.
    """

    def zeros(leaf):
        # zeros_like keeps the leaf's sharding, and its varying axes under shard_map
        return jnp.zeros_like(leaf, dtype=_reduce.accumulator_dtype_of(leaf, accumulator_dtype))

    def body(carry, index):
        value, grads, metrics, accumulated = carry
        seen = _reduce.seen_state(state, accumulated, state_names)
        batch, key = take(index), key_of(index)
        grads, (new_value, micro) = gradient_sum.add(lambda params: objective(params, batch, key, seen), grads)
        accumulated = _reduce.add_state(state, accumulated, micro.state, state_names, index == 0)
        return (value + new_value, grads, _reduce.add_metrics(metrics, micro.metrics), accumulated), None

    gradient_sum = GradientSum(params, accumulator_dtype, in_place)
    value_dtype = functools.reduce(jnp.promote_types, [t.total.dtype for t in shapes.terms], jnp.float32)
    init = (
        jnp.zeros((), value_dtype),
        jax.tree.map(zeros, params),
        _reduce.init_metrics(shapes.metrics),
        _reduce.init_state(state, state_names),
    )
    value, grads, metrics, accumulated = scan(body, init, count, shapes)
    return value, grads, metrics, _reduce.finish_state(state, accumulated, state_names, count), gradient_sum.added
