"""The pre-pass: each objective term's total weight, known before the first gradient."""

import functools

import jax
import jax.numpy as jnp

from jaxmem.accumulate._scan import scan
from jaxmem.accumulate._trace import TracedLoss


def total_weights(traced: TracedLoss, params, state, take, key_of, num_micro_batches: int, carried) -> list:
    """The weight of every "weighted" term, summed over all micro-batches, in at least float32 (None for others).

    The loss's jaxpr is cut to its weights, so a mask that is counted costs no forward pass. A weight
    that depends on carried state needs the states of all micro-batches, and pays for a forward.

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
        return fn(params, take(i), None if key_of is None else key_of(i), state)

    if needs_carry:

        def add_and_carry(accumulated, i):
            totals, state = accumulated
            new, new_state = of_micro_batch(i, state)
            state = jax.tree.map(lambda old, new, carry: new if carry else old, state, new_state, carried)
            return (_add(totals, new), state), None

        totals, _ = scan(add_and_carry, (_zeros(dtypes), state), num_micro_batches, traced.out_shapes)
    elif any(jax.tree.leaves((batch_needs, rng_needs))):

        def add(totals, i):
            return _add(totals, of_micro_batch(i, state)), None

        totals = scan(add, _zeros(dtypes), num_micro_batches, traced.out_shapes)
    else:  # the same for every micro-batch
        weights_of_one = zip(of_micro_batch(0, state), dtypes, strict=True)
        totals = [weight.astype(dtype) * num_micro_batches for weight, dtype in weights_of_one]
    totals = iter(totals)
    return [next(totals) if rule == "weighted" else None for rule in rules]


def weight_dtype(term):
    """The dtype that a term's weights are summed in: float32, or wider where they or the total are."""
    dtypes = [x.dtype for x in (term.total, term.weight) if x is not None and jnp.issubdtype(x.dtype, jnp.floating)]
    return functools.reduce(jnp.promote_types, dtypes, jnp.dtype(jnp.float32))


def _zeros(dtypes):
    return [jnp.zeros((), dtype) for dtype in dtypes]


def _add(totals, new):
    return [total + w.astype(total.dtype) for total, w in zip(totals, new, strict=True)]
