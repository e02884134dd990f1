"""Metrics come out as the whole batch's, each by its declared kind."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import Last, LossOutput, Max, Sum, WeightedMean
from jaxmem.accumulate import value_and_grad
from jaxmem.errors import MetricError
from tests.accumulate.problems import accumulated, assert_trees_close, token_batch, token_loss, token_params

K = [1, 4]


def metrics_of(make, k, x=None):
    x = jnp.arange(8.0) - 9 if x is None else x  # -9 … -2; micro-batch i of 4 holds x[i] and x[i + 4]
    return accumulated(lambda w, x: LossOutput((w * x).mean(), make(x)), k)(jnp.float32(1.0), x).metrics


def test_metrics_are_the_whole_batchs():
    """Case 3: {loss, acc, n_tokens, max_logit}, not K times too large and not the last micro-batch's."""
    batch, params = token_batch([4, 0, 1, 2, 0, 3, 1, 4]), token_params()
    logits = np.asarray(batch["x"], np.float64) @ np.asarray(params["w"], np.float64)
    labels = np.asarray(batch["labels"])
    valid = labels >= 0
    want = {
        "acc": ((logits.argmax(-1) == labels) & valid).sum() / valid.sum(),
        "n_tokens": valid.sum(),
        "max_logit": logits.max(),
    }
    losses = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(logits, labels.clip(0)[..., None], -1)[..., 0]
    for k in K:
        out = accumulated(token_loss, k)(params, batch)
        assert_trees_close(out.metrics, want)
        np.testing.assert_allclose(out.value, losses[valid].mean(), rtol=1e-5)


@pytest.mark.parametrize("k", K)
def test_each_kind(k):
    got = metrics_of(
        lambda x: {
            "sum": Sum(x.sum()),
            "max": Max(x.max()),
            "mean": WeightedMean((x * (x > -4)).sum(), (x > -4).sum()),
            "last": Last(x[0]),
            "nested": {"count": Sum(x.size), "deeper": {"list": [Max(x.min())]}},
        },
        k,
    )
    # Micro-batch K - 1 starts with row K - 1.
    want = {"sum": -44.0, "max": -2.0, "mean": -2.5, "last": k - 10.0}
    assert {name: float(got[name]) for name in want} == want
    assert int(got["nested"]["count"]) == 8
    largest_minimum = max(min(range(i - 9, -1, k)) for i in range(k))
    assert float(got["nested"]["deeper"]["list"][0]) == largest_minimum


@pytest.mark.parametrize("k", K)
def test_dtypes_do_not_depend_on_k(k):
    got = metrics_of(
        lambda x: {
            "bools": Sum(x > -5),
            "int": Sum(jnp.int8(100)),
            "half": Sum(jnp.bfloat16(1.0)),
            "max_int": Max(jnp.int32(-7)),
            "max_bool": Max(x.max() > -4),
            "max_half": Max(jnp.bfloat16(-3.0)),
            "mean_of_bools": WeightedMean((x > -5).sum(), x.size),
            "last_int": Last(jnp.int8(3)),
            "python": Sum(2),
        },
        k,
        jnp.array([-9.0, -3.0, -8.0, -2.0]),
    )
    assert got["bools"].dtype == jnp.int32 and got["bools"].shape == (4 // k,) and int(got["bools"].sum()) == 2
    assert got["int"].dtype == jnp.int32 and int(got["int"]) == 100 * k  # more than int8 holds
    assert got["half"].dtype == jnp.float32 and float(got["half"]) == k
    assert got["max_int"].dtype == jnp.int32 and int(got["max_int"]) == -7
    assert got["max_bool"].dtype == jnp.bool_ and bool(got["max_bool"])
    assert got["max_half"].dtype == jnp.bfloat16 and float(got["max_half"]) == -3
    assert float(got["mean_of_bools"]) == 0.5
    assert got["last_int"].dtype == jnp.int8 and int(got["last_int"]) == 3
    assert int(got["python"]) == 2 * k


def test_counts_beyond_bfloat16_are_exact():
    """Case 19's kind of fault: 512 ones added up in bfloat16 stop at 256."""
    got = metrics_of(
        lambda x: {"n": Sum(jnp.bfloat16(1)), "mean": WeightedMean(jnp.bfloat16(1), 1)}, 512, jnp.ones(512)
    )
    assert float(got["n"]) == 512 and float(got["mean"]) == 1


def test_arrays_are_reduced_elementwise():
    x = jnp.arange(8.0)
    got = metrics_of(
        lambda x: {
            "histogram": Sum((x[:, None] // 2 == jnp.arange(4)).sum(0)),
            "per_class": WeightedMean(jnp.stack([x.sum(), 0.0]), jnp.array([x.size, 0])),
            "shared_weight": WeightedMean(jnp.stack([x.sum(), 2 * x.sum()]), x.size),
            "maxima": Max(jnp.stack([x.max(), -x.min()])),
        },
        4,
        x,
    )
    assert got["histogram"].tolist() == [2, 2, 2, 2]
    assert got["per_class"].tolist() == [3.5, 0.0]  # an empty class is 0, not NaN
    assert got["shared_weight"].tolist() == [3.5, 7.0]
    assert got["maxima"].tolist() == [7.0, 0.0]


def test_a_metric_may_depend_on_the_parameters_and_has_no_gradient():
    loss = lambda w, x: LossOutput((w * x).mean(), {"w": WeightedMean(w**3 * x.size, x.size)})  # noqa: E731
    out = accumulated(loss, 2)(jnp.float32(2.0), jnp.arange(4.0))
    assert float(out.metrics["w"]) == 8 and float(out.grads) == 1.5


def test_nan_in_a_maximum_is_not_hidden():
    got = metrics_of(
        lambda x: {"max": Max(jnp.where(x.sum() < 2, jnp.nan, x.max()))}, 2, jnp.array([0.0, 5.0, 1.0, 6.0])
    )
    assert np.isnan(got["max"])


@pytest.mark.parametrize(
    "metrics, message",
    [
        ({"acc": jnp.ones(())}, "bare .* at metrics/acc"),
        ({"a": {"b": 0.5}}, "bare float at metrics/a/b"),
        ({"ok": Sum(1), "n": [Max(1), 3]}, "bare int at metrics/n/1"),
    ],
)
def test_a_bare_metric_is_refused_by_name(metrics, message):
    with pytest.raises(MetricError, match=message):
        value_and_grad(lambda w, x: LossOutput((w * x).mean(), metrics), 2)(jnp.float32(1.0), jnp.ones(4))


@pytest.mark.parametrize(
    "metrics, message",
    [
        (Sum(1), "a mapping from names .* got a Sum"),
        ([Sum(1)], "got a list"),
        ({"a": None}, "bare NoneType at metrics/a"),
        ({"a": Sum("x")}, "real numbers in the Sum at metrics/a; got str"),
        ({"a": Sum(None)}, "got NoneType"),
        ({"a": Max(1j)}, "got complex"),
        ({"a": Last(jax.random.key(0))}, "in the Last at metrics/a; got key"),
        ({"a": WeightedMean(jnp.ones(3), jnp.ones(2))}, r"broadcast .* got \[\(3,\), \(2,\)\]"),
    ],
)
@pytest.mark.parametrize("k", [1, 2])
def test_what_is_no_metric_is_refused_for_every_k(metrics, message, k):
    with pytest.raises(MetricError, match=message):
        value_and_grad(lambda w, x: LossOutput((w * x).mean(), metrics), k)(jnp.float32(1.0), jnp.ones(4))


def test_no_metrics_is_an_empty_dict():
    out = value_and_grad(lambda w, x: LossOutput((w * x).mean(), None), 2)(jnp.float32(1.0), jnp.ones(4))
    assert out.metrics == {}
    out = jax.eval_shape(value_and_grad(lambda w, x: (w * x).mean(), 2), jnp.float32(1.0), jnp.ones(4))
    assert out.metrics == {}
