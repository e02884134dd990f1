"""The table of rules: what it knows, and what it says that it does not."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from jaxmem._jaxpr_costs import rule_of, unknown_primitives

X = jax.ShapeDtypeStruct((16, 16), jnp.float32)


def layer(x, w):
    h = jax.nn.gelu((x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)) @ w
    return x + jnp.where(jax.random.bernoulli(jax.random.key(0), 0.9, h.shape), jax.nn.softmax(h), 0.0)


def test_a_model_and_its_gradient_are_known():
    def loss(x, w):
        return jax.lax.scan(jax.checkpoint(lambda h, _: (layer(h, w), None)), x, None, length=3)[0].sum()

    assert unknown_primitives(jax.make_jaxpr(jax.grad(loss, (0, 1)))(X, X).jaxpr) == ()


def test_what_is_unknown_is_found_in_loops_and_branches():
    def fn(x):
        x = jax.lax.scan(lambda h, _: (jnp.linalg.cholesky(h), None), x, None, length=2)[0]
        return jax.lax.cond(x.sum() > 0, lambda x: jnp.linalg.qr(x)[0], lambda x: x, x)

    found = unknown_primitives(jax.make_jaxpr(fn)(X).jaxpr)
    assert "cholesky" in found and "qr" in found


def kernel(stated: bool):
    def body(x_ref, y_ref, out_ref):
        @pl.when(pl.program_id(0) < 2)
        def _():
            out_ref[...] = x_ref[...] @ y_ref[...]

    rows, whole = pl.BlockSpec((4, 16), lambda i: (i, 0)), pl.BlockSpec((16, 16), lambda i: (0, 0))
    estimate = pl.CostEstimate(flops=77, transcendentals=0, bytes_accessed=0) if stated else None
    return pl.pallas_call(
        body, out_shape=X, grid=(4,), in_specs=[rows, whole], out_specs=rows, cost_estimate=estimate, interpret=True
    )


@pytest.mark.parametrize(("stated", "flops"), [(True, 77), (False, 2 * 16**3)])
def test_a_kernel_is_what_its_author_states_or_its_products_over_its_grid(stated, flops):
    program = jax.make_jaxpr(kernel(stated))(X, X).jaxpr
    eqn = next(eqn for eqn in program.eqns if eqn.primitive.name == "pallas_call")
    rule = rule_of(eqn)
    assert rule and rule.flops and (rule.kind, rule.flops(eqn)) == ("kernel", flops)
