"""Gradients and values equal the whole batch's, however it is cut and whatever the objective is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem import Sum, WeightedMean
from tests.accumulate.problems import accumulated, assert_trees_close, token_batch, token_loss, token_mean, token_params


def test_a_short_micro_batch_does_not_weigh_as_much_as_a_long_one():
    """Case 1: K=2, token counts (1, 7), losses (1, 0): a mean of means is 0.5, the truth 1/8."""
    # Micro-batch i holds rows i and i + 2: rows 0 and 2 have 1 token of loss 1, rows 1 and 3 have 7 of loss 0.
    batch = {"loss": jnp.array([1.0, 0.0, 0.0, 0.0]), "tokens": jnp.array([1, 3, 0, 4])}

    def loss(w, batch):
        return WeightedMean((w * batch["loss"] * batch["tokens"]).sum(), batch["tokens"].sum())

    out = accumulated(loss, 2)(jnp.float32(1.0), batch)
    assert float(out.value) == float(out.grads) == 1 / 8
    assert [float(weight) for weight in out.weights] == [8.0]


@pytest.mark.parametrize("k", [1, 2, 8])
def test_uneven_token_counts_for_every_k_and_any_order_of_rows(k):
    batch, params = token_batch([4, 0, 1, 2, 0, 3, 1, 4]), token_params()
    want = jax.jit(jax.value_and_grad(token_mean))(params, batch)
    step = accumulated(token_loss, k)
    for order in (np.arange(8), np.array([3, 6, 1, 7, 0, 5, 4, 2])):
        out = step(params, jax.tree.map(lambda x, order=order: x[order], batch))
        assert_trees_close((out.value, out.grads), want)


@pytest.mark.parametrize("k", [1, 2, 8])
@pytest.mark.parametrize("form", ["mean", "weighted", "prenormalised"])
def test_three_ways_to_normalise_are_the_same_for_every_k(k, form):
    """Case 2: a mean over examples, a sum with its weight, and a sum that was divided by the global count."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=8).astype(np.float32))
    w = jnp.float32(0.7)
    losses = lambda w, x: (w * x - 1) ** 2  # noqa: E731
    forms = {
        "mean": lambda w, x: losses(w, x).mean(),
        "weighted": lambda w, x: WeightedMean(losses(w, x).sum(), x.size),
        "prenormalised": lambda w, x: Sum(losses(w, x).sum() / 8),
    }
    out = accumulated(forms[form], k)(w, x)
    assert_trees_close((out.value, out.grads), jax.value_and_grad(lambda w: losses(w, x).mean())(w))


def test_a_sum_of_terms_normalises_each_by_its_own_weight():
    batch = token_batch([4, 0, 1, 2])

    def loss(params, batch):
        ce = token_loss(params, batch).objective
        z = (batch["x"] @ params["w"]) ** 2
        l2 = (params["w"] ** 2).sum()
        return ce + 0.5 * WeightedMean(z.mean((1, 2)).sum(), z.shape[0]) - 1e-2 * l2 + Sum(z.sum() / 100)

    def truth(params):
        z = (batch["x"] @ params["w"]) ** 2
        return token_mean(params, batch) + 0.5 * z.mean() - 1e-2 * (params["w"] ** 2).sum() + z.sum() / 100

    want = jax.jit(jax.value_and_grad(truth))(token_params())
    for k in (1, 4):
        out = accumulated(loss, k)(token_params(), batch)
        assert_trees_close((out.value, out.grads), want)
        assert [float(weight) for weight in out.weights] == [7.0, 4.0]


@pytest.mark.parametrize("k", [1, 2])
def test_a_term_without_weight_contributes_nothing_and_has_a_zero_gradient(k):
    batch = {"x": jnp.arange(1.0, 5.0), "mask": jnp.zeros(4)}

    def loss(w, batch):
        nothing = WeightedMean((w * batch["mask"] * batch["x"]).sum(), batch["mask"].sum())
        return nothing + 3.0 * WeightedMean((w * batch["x"]).sum(), batch["x"].size)

    out = accumulated(loss, k)(jnp.float32(2.0), batch)
    assert float(out.value) == 3 * 2 * 2.5 and float(out.grads) == 3 * 2.5
    alone = accumulated(lambda w, batch: loss(w, batch).terms()[0][1], k)(jnp.float32(2.0), batch)
    assert float(alone.value) == float(alone.grads) == 0.0 and bool(alone.finite)


def test_one_micro_batch_without_valid_tokens_changes_nothing():
    batch = {"x": jnp.array([1.0, 5.0, 3.0, 7.0]), "mask": jnp.array([1.0, 0.0, 1.0, 0.0])}  # micro-batch 1 is empty
    loss = lambda w, b: WeightedMean((w * b["x"] * b["mask"]).sum(), b["mask"].sum())  # noqa: E731
    out = accumulated(loss, 2)(jnp.float32(1.0), batch)
    assert float(out.value) == float(out.grads) == 2.0


def test_complex_parameters():
    x = jnp.asarray(np.random.default_rng(0).normal(size=4) + 1j, jnp.complex64)
    loss = lambda w, x: jnp.mean(jnp.abs(w * x - 1) ** 2)  # noqa: E731
    w = jnp.complex64(0.3 - 0.2j)
    for k in (1, 4):
        out = accumulated(loss, k)(w, x)
        assert out.grads.dtype == jnp.complex64
        assert_trees_close((out.value, out.grads), jax.value_and_grad(loss)(w, x))


def test_no_parameters_and_none_leaves():
    out = accumulated(lambda params, x: x.mean(), 2)({}, jnp.arange(4.0))
    assert out.grads == {} and float(out.value) == 1.5 and bool(out.finite)
    out = accumulated(lambda params, x: (params["w"] * x).mean(), 2)({"w": 2.0, "none": None}, jnp.arange(4.0))
    assert out.grads["none"] is None and float(out.grads["w"]) == 1.5


@settings(max_examples=8)
@given(
    k=st.sampled_from([1, 2, 3, 4, 6]),
    rows=st.integers(1, 2),
    seed=st.integers(0, 99),
    factors=st.lists(st.floats(-2, 2, width=32), min_size=1, max_size=3),
)
def test_random_objectives_equal_the_one_batch_gradient(k, rows, seed, factors):
    """Terms `sum_i m_i tanh(w x_i)^p / sum_i m_i` of random rows, masks (some empty) and factors; truth in numpy."""
    rng = np.random.default_rng(seed)
    size = k * rows
    x = rng.normal(size=size)
    masks = rng.integers(0, 3, (len(factors), size)) * (rng.random((len(factors), 1)) < 0.8)
    w = rng.normal()

    def loss(w, batch):
        return sum(
            factor * WeightedMean((m * jnp.tanh(w * batch["x"]) ** (p + 1)).sum(), m.sum())
            for p, (factor, m) in enumerate(zip(factors, batch["m"].T, strict=True))
        )

    batch = {"x": jnp.asarray(x, jnp.float32), "m": jnp.asarray(masks.T, jnp.int32)}
    out = accumulated(loss, k)(jnp.float32(w), batch)
    value = grad = 0.0
    for p, (factor, m) in enumerate(zip(factors, masks, strict=True)):
        if m.sum():
            t = np.tanh(w * x)
            value += factor * (m * t ** (p + 1)).sum() / m.sum()
            grad += factor * (m * (p + 1) * t**p * (1 - t**2) * x).sum() / m.sum()
    np.testing.assert_allclose([out.value, out.grads], [value, grad], rtol=1e-5, atol=2e-6)


def test_float64_is_exact_where_it_is_enabled():
    """Weights of 0.1, a factor of 0.3 and float64 accumulators: far closer than float32 could be, for any K."""
    rng = np.random.default_rng(0)
    x, m, w = rng.normal(size=8), 0.1 * rng.integers(0, 3, 8), 0.7
    t = np.tanh(w * x)
    want = [0.3 * (m * t).sum() / m.sum(), 0.3 * (m * (1 - t**2) * x).sum() / m.sum()]
    loss = lambda w, b: 0.3 * WeightedMean((b["m"] * jnp.tanh(w * b["x"])).sum(), b["m"].sum())  # noqa: E731
    with jax.enable_x64(True):
        for k in (1, 4):
            out = accumulated(loss, k, accumulator_dtype="float64")(jnp.float64(w), {"x": x, "m": m})
            assert out.value.dtype == out.grads.dtype == jnp.float64
            np.testing.assert_allclose([out.value, out.grads], want, rtol=1e-14)
        narrow = {"x": np.float32(x), "m": np.float32(m)}
        narrow = jax.eval_shape(accumulated(loss, 4, accumulator_dtype="float64"), np.float32(w), narrow)
        assert narrow.value.dtype == narrow.grads.dtype == jnp.float32
