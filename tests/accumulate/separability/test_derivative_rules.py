"""Derivative rules of a loss's own, and metrics: shards may sum by themselves only where these are of each row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import Last, LossOutput, Max, Sum, WeightedMean
from jaxmem.accumulate import separable_by_rows

X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 4)) * np.linspace(0.1, 2, 16)[:, None], jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(4, 4)), jnp.float32)


def rule(bwd, fwd=lambda x: x):
    found = jax.custom_vjp(lambda x: x)
    found.defvjp(lambda x: (fwd(x), None), lambda _, gradient: (bwd(gradient),))
    return found


def tangent_rule(tangent):
    found = jax.custom_jvp(lambda x: x)
    found.defjvp(lambda primals, tangents: (primals[0], tangent(primals[0], tangents[0])))
    return found


def quantized(gradient):
    scale = jnp.abs(gradient).max() / 3
    return jnp.round(gradient / scale) * scale


def clipped(axis):
    return lambda g: g / jnp.maximum(1, 100 * jnp.linalg.norm(g, axis=axis, keepdims=axis is not None))


def straight_through(y):
    return y + jax.lax.stop_gradient(jnp.round(y) - y)


activations = {
    "each element": (rule(lambda g: jnp.clip(g, -0.01, 0.01)), "yes"),
    "norm of a row": (rule(clipped(-1)), "yes"),
    "centred in a row": (rule(lambda g: g - g.mean(-1, keepdims=True)), "yes"),
    "tangent": (tangent_rule(lambda x, t: t * jnp.cos(x)), "yes"),
    "straight-through": (straight_through, "yes"),
    "vmapped": (jax.vmap(rule(quantized)), "yes"),
    "checkpointed": (jax.checkpoint(rule(clipped(-1))), "yes"),
    "of all rows": (rule(quantized), "no"),
    "norm of all rows": (rule(clipped(None)), "no"),
    "centred over rows": (rule(lambda g: g - g.mean(0)), "no"),
    "sorted": (rule(lambda g: jnp.sort(g, 0)), "no"),
    "only forward": (rule(lambda g: g, fwd=lambda x: x - x.mean(0)), "no"),
    "tangent of all rows": (tangent_rule(lambda x, t: t * x.mean()), "no"),
    "custom_gradient": (jax.custom_gradient(lambda x: (x, lambda g: g / jnp.abs(g).max())), "no"),
    "jitted": (jax.jit(rule(quantized)), "no"),
    "checkpointed, of all rows": (jax.checkpoint(rule(quantized)), "no"),
    "in a scan": (lambda y: jax.lax.scan(lambda c, _: (rule(quantized)(c), None), y, None, length=2)[0], "no"),
    "in a cond": (lambda y: jax.lax.cond(y.size > 0, rule(quantized), jnp.sin, y), "no"),
    "by the number of rows": (rule(lambda g: g * len(g)), "unknown"),
    "by the place": (rule(lambda g: g * jnp.arange(len(g))[:, None]), "unknown"),
    "neighbours": (rule(lambda g: jnp.roll(g, 1, 0)), "unknown"),
    "first row": (rule(lambda g: g.at[0].set(0.0)), "unknown"),
}
ON_PARAMETERS = {
    "scaled": (rule(lambda g: 2 * g), "yes"),
    "clipped": (rule(lambda g: jnp.clip(g, -0.01, 0.01)), "no"),
    "normalised": (rule(lambda g: g / jnp.linalg.norm(g)), "no"),
    "in 8 bits": (rule(lambda g: g.astype(jnp.float8_e4m3fn).astype(g.dtype)), "no"),
    "in one digit": (rule(lambda g: jax.lax.reduce_precision(g, 5, 1)), "no"),
    "in all digits": (rule(lambda g: jax.lax.reduce_precision(g, 8, 23)), "yes"),
}
LOSSES = {name: (lambda w, x, f=f: (f(jnp.tanh(x @ w)) ** 2).mean(), want) for name, (f, want) in activations.items()}
LOSSES |= {
    f"parameters {name}": (lambda w, x, f=f: ((x @ f(w)) ** 2).mean(), want)
    for name, (f, want) in ON_PARAMETERS.items()
}
LOSSES |= {
    "gradient of each row within": (lambda w, x: (jax.grad(lambda x: jnp.tanh(x @ w).sum())(x) ** 2).mean(), "yes"),
    "step on all rows within": (
        lambda w, x: ((x @ (w - jax.grad(lambda w: ((x @ w) ** 2).sum())(w))) ** 2).mean(),
        "unknown",
    ),
    "a number in a constant": (lambda w, x: ((x @ w) * np.array([1.0, 2, len(x), 3])).mean(), "unknown"),
    "a place by a number": (lambda w, x: ((x @ w) * jnp.arange(32.0)[len(x) - 1]).mean(), "unknown"),
    "a count that is rounded": (lambda w, x: (x @ w).mean() * (x > 0).sum().astype(bool), "unknown"),
    "other wiring": (lambda w, x: (jnp.sin((x @ w, x)[len(x) < 16]) * (x, x @ w)[len(x) < 16]).mean(), "unknown"),
    "a reducer of its own": (lambda w, x: jax.lax.reduce(x @ w, 1.0, lambda a, b: a * b, (1,)).mean(), "unknown"),
    "fft of a row": (lambda w, x: (jnp.abs(jnp.fft.fft(x @ w)) ** 2).mean(), "yes"),
    "fft over rows": (lambda w, x: (jnp.abs(jnp.fft.fft(x @ w, axis=0)) ** 2).mean(), "unknown"),
}  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_derivative_rules_count(name):
    """What is found is also compared with the gradients: of the whole, and of four parts, each with its share."""
    loss, want = LOSSES[name]
    found = separable_by_rows(loss, W, X, parts=4)
    assert found.verdict == want and bool(found.why) == (want != "yes"), found
    whole = jax.value_and_grad(loss)(W, X)
    parts = [jax.value_and_grad(lambda w, x: loss(w, x) / 4)(W, X[i::4]) for i in range(4)]
    parts = jax.tree.map(lambda *leaves: sum(leaves), *parts)
    same = all(np.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(parts, whole, strict=True))
    assert same == (want == "yes") or name in ("a count that is rounded", "a reducer of its own")


def test_what_raises_while_it_is_followed_is_unknown():
    def picky(w, x):
        if len(x) < 16:
            raise RuntimeError("sixteen rows or none")
        return (x @ w).mean()

    found = separable_by_rows(picky, W, X)
    assert found.verdict == "unknown" and "sixteen rows or none" in found.why


METRICS = {
    "share": (lambda w, x: WeightedMean((x > 0).sum(), x.size), "yes"),
    "mean of means": (lambda w, x: WeightedMean(x.mean(), 1), "yes"),
    "rows": (lambda w, x: Sum(len(x)), "yes"),
    "largest": (lambda w, x: Max(jnp.abs(x @ w).max()), "yes"),
    "largest, counted": (lambda w, x: Max((x > 9).max().astype(jnp.int32)), "yes"),
    "any": (lambda w, x: Max((x > 1).any()), "yes"),
    "bits of any": (
        lambda w, x: Max(jax.lax.reduce(x.astype(jnp.int32), np.int32(0), jax.lax.bitwise_or, (0,)).max()),
        "no",
    ),
    "largest of some": (lambda w, x: Max(jnp.abs(x @ w).max(0)[:2]), "yes"),
    "largest, wrapped": (lambda w, x: Max((x * 200).max().astype(jnp.int32).astype(jnp.uint8)), "no"),
    "rate": (lambda w, x: Last(0.1), "yes"),
    "norm": (lambda w, x: Last(jnp.linalg.norm(w)), "yes"),
    "mean of no row": (lambda w, x: WeightedMean(jnp.linalg.norm(w), 1), "yes"),
    "deviation": (lambda w, x: WeightedMean((x @ w).std(), 1), "no"),
    "calls": (lambda w, x: Sum(1.0), "no"),
    "sum of no row": (lambda w, x: Sum((w**2).sum()), "no"),
    "no row for each": (lambda w, x: WeightedMean((w**2).sum(), len(x)), "no"),
    "mean of a maximum": (lambda w, x: WeightedMean(x.max(), 1), "no"),
    "largest mean": (lambda w, x: Max((x @ w).mean(0).max()), "unknown"),
    "last": (lambda w, x: Last(x.mean()), "unknown"),
    "mean as a sum": (lambda w, x: Sum(x.mean()), "unknown"),
    "each row": (lambda w, x: Sum(x.sum(1)), "unknown"),
    "root of the rows": (lambda w, x: WeightedMean(x.sum(), len(x) ** 0.5), "unknown"),
}


@pytest.mark.parametrize("name", METRICS)
def test_metrics_are_part_of_the_claim(name):
    metric, want = METRICS[name]
    loss = lambda w, x: LossOutput((x @ w).mean(), {"metric": metric(w, x)})  # noqa: E731
    found = separable_by_rows(loss, W, X)
    assert found.verdict == want and bool(found.why) == (want != "yes"), found


FACTORS = {
    "a number": (lambda x: 0.1, "yes"),
    "one over the rows": (lambda x: 1 / len(x), "no"),
    "the rows": (lambda x: float(len(x)), "no"),
    "a root of the rows": (lambda x: len(x) ** 0.5, "unknown"),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_are_constants_of_the_step(name):
    factor, want = FACTORS[name]
    loss = lambda w, x: factor(x) * Sum((x @ w).sum()) + WeightedMean((x @ w).sum(), len(x))  # noqa: E731
    assert separable_by_rows(loss, W, X, parts=4).verdict == want
