"""Gradients under a budget are those of the plain function, whatever it is made of."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import io_callback

from jaxmem.remat.auto import auto
from tests.remat.auto.helpers import BUDGETS, assert_same, gradients

X = jnp.linspace(0.0, 1.0, 8).reshape(2, 4)  # the first is 0
W = 0.3 * jnp.ones((4, 4))
STACK = jnp.stack([W, 0.5 * W, -W])


def layer(x, w):
    return jnp.tanh(jnp.sin(x @ w)) * x


def loop(ws, x):
    for w in ws:
        x = layer(x, w)
    return x


def test_one_block_several_and_a_scan():
    assert_same(lambda w, x: layer(x, w), W, X, argnums=(0, 1))
    assert_same(loop, list(STACK), X, argnums=(0, 1))
    assert_same(lambda ws, x: lax.scan(lambda h, w: (layer(h, w), h.sum()), x, ws), STACK, X, argnums=(0, 1))


@pytest.mark.parametrize("form", ["loop", "scan"])
def test_an_infinite_derivative_that_is_stopped_gives_no_nan(form):
    def body(h, w):
        h = layer(h, w)
        return h, jnp.sqrt(jnp.abs(h))  # at 0

    def looped(ws, x):
        roots = []
        for w in ws:
            x, root = body(x, w)
            roots.append(root)
        return x, lax.stop_gradient(roots)

    def scanned(ws, x):
        x, roots = lax.scan(body, x, ws)
        return x, lax.stop_gradient(roots)

    assert_same(looped if form == "loop" else scanned, STACK, X, argnums=(0, 1))


def test_what_comes_out_of_a_block_behind_a_stop_has_no_derivative():
    def doubled_until(bound):  # which JAX refuses to differentiate
        return lax.while_loop(lambda s: s < bound, lambda s: 2 * s, 1.0)

    def loss(ws, x):
        for w in ws:
            x = layer(x, w)
            x = x * doubled_until(lax.stop_gradient(x).sum() + 3)
        return x

    assert_same(loss, STACK, X, argnums=(0, 1))


def test_python_values_stay_what_they_are():
    def loss(x, *, sign, mode, more, number):
        assert type(sign) is bool and type(number) is float
        return (-1.0 if sign else 1.0) * layer(x, W) * number, {"mode": mode, "more": more, "number": 3, "sign": sign}

    x = X
    options = {"sign": True, "mode": "train", "more": None, "number": 2.5}
    want, got = loss(x, **options), auto(loss, 0.5)(x, **options)
    assert got[1] == want[1] and type(got[1]["number"]) is int and type(got[1]["sign"]) is bool
    assert jnp.allclose(got[0], want[0], rtol=1e-6)
    assert_same(lambda x: loss(x, **options)[0], X)


def test_closed_over_arrays_and_tracers():
    assert_same(lambda x: layer(x, W) @ STACK[1], X)

    def outer(under):
        def loss(w):
            inner = under(lambda x: layer(layer(x, w), w))
            return jax.grad(lambda x: inner(x).sum())(X) * inner(X)

        return loss

    want = gradients(outer(lambda fn: fn), W)
    for budget in BUDGETS:
        got = gradients(outer(lambda fn, budget=budget: auto(fn, budget)), W)
        assert all(
            jnp.allclose(a, b, rtol=1e-5) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
        )


def test_effects_happen_once():
    calls = []

    def note(value):
        calls.append(float(value))
        return value

    def loss(x):
        jax.debug.callback(calls.append, jnp.sin(x).sum())
        seen = io_callback(note, jax.ShapeDtypeStruct((), x.dtype), lax.stop_gradient(x).sum())
        io_callback(lambda value: calls.append(value), None, lax.stop_gradient(jnp.cos(x)).sum())
        return layer(x, W) * seen

    def once(ws, x):
        def body(h, w):
            jax.debug.callback(calls.append, h.sum())
            return layer(h, w), None

        return lax.scan(body, x, ws)[0]

    for fn, args in ((loss, (X,)), (once, (STACK, X))):
        for made in (fn, *(auto(fn, budget) for budget in (0.0, 0.5, 0.95))):
            calls.clear()
            jax.block_until_ready(jax.grad(lambda *args, made=made: made(*args).sum())(*args))
            jax.effects_barrier()
            assert len(calls) == 3, fn.__name__


def test_nothing_to_differentiate():
    numbers = jnp.arange(4)
    assert auto(lambda i: i * 2, 0.5)(numbers).tolist() == [0, 2, 4, 6]
    assert auto(lambda: 1.0, 0.5)() == 1.0
    assert auto(lambda i: i * 2, 0.5).solve(numbers).plain_bytes == 0
    assert_same(lambda x, i: x[i % 2] + layer(x, W)[:1], X, numbers)
