"""`nested_scan` is `lax.scan`: values, gradients, errors; and keeps and recomputes what its price says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from jaxmem.remat import nested_scan

# Gradients differ by the order of additions only, so by a few units in the last place of the dtype.
TOLERANCE = {"float64": 1e-13, "float32": 3e-6, "bfloat16": 3e-2}
ROWS, WIDTH = 3, 4


def problem(length: int, dtype="float32", seed=0):
    """A body with all that a scan may hold: a closure, dropout keys, counts and labels, outputs."""
    rng = np.random.default_rng(seed)
    params = {
        "w": jnp.asarray(rng.normal(size=(length, WIDTH, WIDTH)) / WIDTH, dtype),
        "b": jnp.asarray(rng.normal(size=(length, WIDTH)) / WIDTH, dtype),
    }
    shared = jnp.asarray(rng.normal(size=WIDTH), dtype)
    data = {"key": jax.random.split(jax.random.key(seed), length), "label": jnp.arange(length) % WIDTH}
    init = {"h": jnp.asarray(rng.normal(size=(ROWS, WIDTH)), dtype), "count": jnp.int32(0)}

    def loss(scan, params, h, shared):
        def body(carry, x):
            h = carry["h"]
            keep = jax.random.bernoulli(x["key"], 0.8, h.shape)
            h = h + jnp.tanh(h @ x["w"] + x["b"]) * keep * shared
            out = {"logit": h[:, x["label"]], "count": carry["count"]}
            return {"h": h, "count": carry["count"] + x["label"]}, out

        carry, ys = scan(body, {**init, "h": h}, {**params, **data})
        value = jnp.sum(carry["h"].astype(jnp.float32) ** 2) + jnp.mean(jnp.sin(ys["logit"].astype(jnp.float32)))
        return value, (carry, ys)

    return loss, (params, init["h"], shared)


def assert_close(got, want, dtype="float32"):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE[dtype] * max(1.0, np.abs(b).max(initial=0)))


def value_and_grad(loss, scan):
    return jax.jit(jax.value_and_grad(functools.partial(loss, scan), argnums=(0, 1, 2), has_aux=True))


CUTS = st.one_of(
    st.builds(lambda k: {"segment": k}, st.integers(1, 13)),
    st.just({"segment": "sqrt"}),
    st.builds(lambda m: {"levels": m}, st.integers(1, 4)),
)


@settings(max_examples=25)
@given(
    length=st.integers(1, 12),
    cuts=CUTS,
    policy=st.sampled_from(["full", "none", "dots"]),
    reverse=st.booleans(),
    unroll=st.sampled_from([1, 2, True]),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_values_and_gradients_are_those_of_lax_scan(length, cuts, policy, reverse, unroll, dtype):
    loss, args = problem(length, dtype)
    scan = functools.partial(nested_scan, **cuts, policy=policy, reverse=reverse, unroll=unroll)
    got = value_and_grad(loss, scan)(*args)
    want = value_and_grad(loss, functools.partial(lax.scan, reverse=reverse))(*args)
    assert_close(got, want, dtype)
