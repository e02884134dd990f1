"""The two scans over micro-batches: the pre-pass adds up weights, the loop adds up gradients, metrics and state."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._compat import varying_axes
from jaxmem.accumulate import _reduce
from jaxmem.accumulate._gradient_sum import Added, GradientSum
from jaxmem.accumulate._trace import MicroLoss, TracedLoss


def total_weights(traced: TracedLoss, params, state, take, key_of, num_micro_batches: int, carried) -> list:
    """The weight of every "weighted" term, summed over all micro-batches, in at least float32; None for other terms.

    The loss's jaxpr is pruned to its weights, so counting a mask costs no forward pass. A weight that depends on
    carried state needs the states of all micro-batches, and costs a forward pass.

    Args:
      take: index → micro-batch.
      key_of: index → the micro-batch's PRNG key.
      carried: tree of bools over `state`, True where micro-batch i + 1 sees what micro-batch i returned.
    """

    def weights(micro):
        return [term.weight for term in micro.terms if term.rule == "weighted"]

    rules = [term.rule for term in traced.out_shapes.terms]
    dtypes = [weight_dtype(term) for term in traced.out_shapes.terms if term.rule == "weighted"]
    if not dtypes:
        return [None] * len(rules)
    fn, needs = traced.cut(weights)
    _, batch_needs, rng_needs, state_needs = needs
    needs_carry = any(jax.tree.leaves(jax.tree.map(lambda need, carry: need and carry, state_needs, carried)))
    if needs_carry:
        fn, _ = traced.cut(lambda micro: (weights(micro), micro.state))

    def of_micro_batch(i, state):
        return fn(params, take(i), key_of(i), state)

    if needs_carry:

        def add_and_carry(accumulated, i):
            totals, state = accumulated
            new, new_state = of_micro_batch(i, state)
            state = jax.tree.map(lambda old, new, carry: new if carry else old, state, new_state, carried)
            return (_add(totals, new), state), None

        totals, _ = _scan(add_and_carry, (_zeros(dtypes), state), num_micro_batches, traced.out_shapes)
    elif any(jax.tree.leaves((batch_needs, rng_needs))):

        def add(totals, i):
            return _add(totals, of_micro_batch(i, state)), None

        totals = _scan(add, _zeros(dtypes), num_micro_batches, traced.out_shapes)
    else:  # the same for every micro-batch
        weights_of_one = zip(of_micro_batch(0, state), dtypes, strict=True)
        totals = [weight.astype(dtype) * num_micro_batches for weight, dtype in weights_of_one]
    totals = iter(totals)
    return [next(totals) if rule == "weighted" else None for rule in rules]


def weight_dtype(term):
    """The dtype in which a term's weights are summed: the widest of float32, the total's and the weight's."""
    dtypes = [x.dtype for x in (term.total, term.weight) if x is not None and jnp.issubdtype(x.dtype, jnp.floating)]
    return functools.reduce(jnp.promote_types, dtypes, jnp.dtype(jnp.float32))


def _zeros(dtypes):
    return [jnp.zeros((), dtype) for dtype in dtypes]


def _add(totals, new):
    return [total + w.astype(total.dtype) for total, w in zip(totals, new, strict=True)]


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
    """Value, gradients, metrics and state over all micro-batches, and how gradients were added up.

    Args:
      objective: (params, batch, key, state) -> (scalar to differentiate, (value, MicroLoss)).
      take: index -> micro-batch.
      key_of: index -> the micro-batch's PRNG key.
      count: number of micro-batches.
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
        _reduce.init_metrics(shapes.metrics, count),
        _reduce.init_state(state, state_names),
    )
    value, grads, metrics, accumulated = _scan(body, init, count, shapes)
    return value, grads, metrics, _reduce.finish_state(state, accumulated, state_names, count), gradient_sum.added


def _scan(body: Callable, init: Any, count: int, shapes: Any) -> Any:
    """The carry of a `lax.scan` over the indices 0, 1, …, `count` - 1, with a carry that starts as zeros.

    Within a `jax.shard_map` the zeros vary over no axis of the mesh, while the values added to them may. A scan's carry
    must have its final type from the start, so it is found by evaluating the body abstractly.

    Args:
      shapes: of the outputs of a micro-batch's loss; if none of them varies, the types are right already.
    """
    if any(varying_axes(leaf) for leaf in jax.tree.leaves(shapes)):
        before = None
        while before != (before := [varying_axes(leaf) for leaf in jax.tree.leaves(init)]):
            after, _ = jax.eval_shape(body, init, jnp.zeros((), jnp.int32))
            init = jax.tree.map(_varying_as, init, after)
    return jax.lax.scan(body, init, jnp.arange(count))[0]


def _varying_as(value, like):
    missing = varying_axes(like) - varying_axes(value)
    return jax.lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value
