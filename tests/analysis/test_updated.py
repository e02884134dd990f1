"""Outputs that are an argument with something added."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmem.analysis._updated import unchanged_outputs, updated_arguments

W = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def loss(w, x):
    return jnp.mean((x @ w) ** 2)


def plain(w, x):
    return jax.grad(loss)(w, x), optax.apply_updates(w, jax.grad(loss)(w, x))


def narrowed(w, x):
    return (w - 0.1 * jax.grad(loss)(w, x)).astype(jnp.bfloat16)


def if_finite(w, x):
    gradient = jax.grad(loss)(w, x)
    return jnp.where(jnp.isfinite(gradient).all(), w - gradient, w)


def by_cond(w, x):
    gradient = jax.grad(loss)(w, x)
    return jax.lax.cond(jnp.isfinite(gradient).all(), lambda: w - gradient, lambda: w)


def many(w, xs):
    return jax.lax.scan(lambda w, x: (w - jax.grad(loss)(w, x), loss(w, x)), w, xs)


def looped(w, x):
    return jax.lax.fori_loop(0, 3, lambda _, w: w - jax.grad(loss)(w, x), w)


def inside(w, x):
    return jax.jit(if_finite)(w, x)


def decayed(w, x):  # the update that an optimizer with weight decay returns, not the parameters
    return -0.1 * (jax.grad(loss)(w, x) + 0.01 * w)


@pytest.mark.parametrize(
    ("step", "want"),
    [
        (plain, {0: 1}),
        (narrowed, {0: 0}),
        (if_finite, {0: 0}),
        (by_cond, {0: 0}),
        (looped, {0: 0}),
        (inside, {0: 0}),
        (decayed, {}),
        (jax.grad(loss), {}),
    ],
)
def test_parameters_and_what_only_has_their_shape(step, want):
    assert updated_arguments(jax.make_jaxpr(step)(W, W)) == want


def test_the_carry_of_a_scan_is_updated_and_what_it_stacks_is_not():
    assert updated_arguments(jax.make_jaxpr(many)(W, W.update(shape=(3, 4, 4)))) == {0: 0}


def test_outputs_that_are_an_argument_as_it_came():
    assert unchanged_outputs(jax.make_jaxpr(lambda w, x: (x + 1, w, 3))(W, W)) == {1: 0}
