"""`residual_bytes` against hand arithmetic."""

import functools

import jax
import jax.numpy as jnp
import pytest

from jaxmem.remat import checkpoint, residual_bytes

F32 = jnp.float32
shape = jax.ShapeDtypeStruct


def test_a_chain_keeps_one_value_an_operation():
    x = shape((10, 3), F32)
    assert residual_bytes(jnp.sin, x) == 120  # cos(x)
    assert residual_bytes(lambda x: jnp.sin(jnp.sin(jnp.sin(x))), x) == 3 * 120
    assert residual_bytes(lambda x: 2 * x + 1, x) == 0  # linear
    assert residual_bytes(lambda x: x * x, x) == 0  # the argument itself is there anyway


def test_a_value_kept_twice_counts_once():
    def fn(x):
        y = jnp.exp(x)  # exp' is exp: kept for itself, and for each product with it
        return y * y, y * jnp.float32(2)

    assert residual_bytes(fn, shape((8,), F32)) == 8 * 4


def test_bytes_follow_the_dtype():
    double_sin = lambda x: jnp.sin(jnp.sin(x))  # noqa: E731
    assert residual_bytes(double_sin, shape((100,), jnp.bfloat16)) == 2 * 100 * 2
    assert residual_bytes(double_sin, shape((100,), F32)) == 2 * 100 * 4


@pytest.mark.parametrize(
    "preset, kept",
    [
        ("none", 2 * 4 * 16 * 4 + 4 * 16 * 4),  # tanh and its derivative, of 4 × 16; and the second tanh's
        ("full", 0),
        ("dots", 2 * 4 * 16 * 4),  # both products
        ("dots_no_batch", 2 * 4 * 16 * 4),
    ],
)
def test_presets_on_two_matmuls(preset, kept):
    def block(w, x):
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    got = residual_bytes(checkpoint(block, preset), shape((16, 16), F32), shape((4, 16), F32))
    if preset == "none":  # what JAX keeps of a tanh differs by version: the value, or value and derivative
        assert kept - 4 * 16 * 4 <= got <= kept + 4 * 16 * 4
    else:
        assert got == kept


def test_batched_products_are_saved_by_dots_only():
    """Case 27: 'bij,bjk' has a batch dimension, so dots_no_batch keeps one array less, the projection's only."""

    def block(w, x, y):
        z = jnp.sin(jnp.einsum("bij,bjk->bik", x, y))  # batched: 3 × 5 × 7
        return jnp.sin(z @ w)  # not batched: 3 × 5 × 2

    args = shape((7, 2), F32), shape((3, 5, 6), F32), shape((3, 6, 7), F32)
    batched, plain = 3 * 5 * 7 * 4, 3 * 5 * 2 * 4
    kept = {name: residual_bytes(checkpoint(block, name), *args) for name in ("full", "dots", "dots_no_batch")}
    assert kept == {"full": 0, "dots": batched + plain, "dots_no_batch": plain}


def test_scan_stacks_its_residuals():
    fn = lambda x: jax.lax.scan(lambda x, _: (jnp.sin(x), None), x, length=7)[0]  # noqa: E731
    assert residual_bytes(fn, shape((5,), F32)) == 7 * 5 * 4


def test_argnums_leaves_the_others_undifferentiated():
    """Case 31 in small: with respect to the head only, the backbone's activations are not kept."""
    fn = lambda backbone, head, x: jnp.sin(jnp.sin(x * backbone)) @ head  # noqa: E731
    args = shape((6,), F32), shape((6,), F32), shape((4, 6), F32)
    assert residual_bytes(fn, *args, argnums=1) == 4 * 6 * 4  # the head's input
    assert residual_bytes(fn, *args, argnums=0) > 4 * 6 * 4


def test_keys_among_residuals_have_bytes():
    def fn(x, key):
        block = checkpoint(lambda x, key: jnp.sin(x) * jax.random.normal(key, x.shape), "full")
        return block(x, jax.random.split(key)[0])

    got = residual_bytes(functools.partial(fn), shape((6,), F32), jax.random.key(0), argnums=0)
    assert got == 2 * 4  # the split key, two uint32; x is an argument


def test_nothing_is_computed():
    huge = shape((1 << 20, 1 << 20), F32)  # 4 TiB
    assert residual_bytes(lambda x: jnp.sin(jnp.sin(x)), huge) == 2 * 4 << 40
