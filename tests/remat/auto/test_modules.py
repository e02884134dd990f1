"""Flax modules under a budget: dropout, batch statistics, frozen weights; attention by a rule of its own."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from jaxmem.remat.auto import auto
from tests.remat.auto.helpers import assert_same, count, gradient_jaxpr, gradients

X = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        h = nn.BatchNorm(use_running_average=not train)(x)
        h = nn.Dropout(0.4, deterministic=not train)(nn.gelu(nn.Dense(8)(h)))
        return x + nn.Dense(4)(h)


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = True):
        for _ in range(2):
            x = Block()(x, train)
        return x


def test_linen_dropout_and_batch_statistics():
    shapes = jax.eval_shape(lambda: Stack().init(jax.random.key(0), X, False))
    variables = jax.tree.map(lambda s: jnp.linspace(-0.5, 0.6, s.size).reshape(s.shape), shapes)

    def loss(params, stats, x, key, *, train=True):
        out, new = Stack().apply(
            {"params": params, "batch_stats": stats}, x, train, rngs={"dropout": key}, mutable=["batch_stats"]
        )
        return out, new["batch_stats"]

    assert_same(loss, variables["params"], variables["batch_stats"], X, jax.random.key(1), budgets=(0.3,))


def test_nnx_modules_as_pytrees():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.up, self.down = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)

        def __call__(self, x):
            return x + self.down(jnp.tanh(self.up(x)))

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([Layer(rngs) for _ in range(3)])

        def __call__(self, x):
            for one in self.layers:
                x = one(x)
            return x

    graph, state = nnx.split(Model(nnx.Rngs(0)))
    assert_same(lambda state, x: nnx.merge(graph, state)(x), state, X, budgets=(0.3,))


def test_a_frozen_weight_has_no_residual():
    """As in LoRA: the input of a frozen product is not kept, since nothing reads it."""
    frozen, small = 0.5 * jnp.eye(4), 0.1 * jnp.ones((4, 2))

    def loss(adapters, frozen, x):
        for a, b in adapters:
            x = jnp.tanh(x @ frozen + (x @ a) @ b)
        return x

    adapters = [(small, small.T)] * 3
    assert_same(loss, adapters, frozen, X, budgets=(0.5,))
    made = gradient_jaxpr(auto(loss, 0.5), adapters, frozen, X).jaxpr
    both = gradient_jaxpr(auto(loss, 0.5), adapters, frozen, X, argnums=(0, 1)).jaxpr
    assert count(made, "dot_general") == count(both, "dot_general") - 3  # no gradient of the frozen weight


@jax.custom_vjp
def attention(q, k, v):
    return kernel(q, k, v)[0]


def kernel(q, k, v):
    logits = q @ k.T
    top = jax.lax.cummax(logits, axis=1)[:, -1:]  # marks the kernel in a program
    p = jnp.exp(logits - top)
    total = p.sum(-1, keepdims=True)
    return p @ v / total, top + jnp.log(total)


def attention_forward(q, k, v):
    out, log_total = kernel(q, k, v)
    return out, (q, k, v, out, log_total)


def attention_backward(kept, ct):
    q, k, v, out, log_total = kept
    p = jnp.exp(q @ k.T - log_total)
    ds = p * (ct @ v.T - (ct * out).sum(-1, keepdims=True))
    return ds @ k, ds.T @ q, p.T @ ct


attention.defvjp(attention_forward, attention_backward)


def attend(ws, x):
    for w in ws:
        x = x + attention(jnp.sin(x @ w), jnp.cos(x @ w), x)
    return x


WEIGHTS = [0.3 * jnp.eye(4)] * 3


def test_a_kernel_whose_outputs_are_kept_runs_once():
    assert_same(attend, WEIGHTS, X)
    runs = {share: count(gradient_jaxpr(auto(attend, share), WEIGHTS, X).jaxpr, "cummax") for share in (0.0, 0.5, 0.8)}
    kept = auto(attend, 0.8).solve(WEIGHTS, X)
    assert runs[0.0] == 6 and runs[0.8] == 3, (runs, str(kept))


def test_a_budget_is_for_any_step_of_a_scan():
    ws = jnp.stack(WEIGHTS)
    scanned = lambda ws, x: jax.lax.scan(lambda h, w: (attend([w], h), None), x, ws)[0]  # noqa: E731
    assert_same(scanned, ws, X)
    np.testing.assert_allclose(
        gradients(scanned, ws, X)[1], jnp.stack(gradients(attend, WEIGHTS, X)[1]), rtol=1e-4, atol=1e-6
    )
