"""What is cut, what is passed whole, what is padded, and what is refused by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import LossOutput, Sum, WeightedMean
from jaxmem.accumulate import micro_batch, value_and_grad
from jaxmem.errors import BatchError, ConfigError, ObjectiveError
from tests.accumulate.problems import (
    IGNORED,
    accumulated,
    assert_trees_close,
    token_batch,
    token_loss,
    token_mean,
    token_params,
)

mean_loss = lambda w, batch: (w * batch["x"]).mean()  # noqa: E731


def test_a_batch_that_k_does_not_divide_is_refused_with_its_path_b_and_k():
    """Case 4: ten rows and K=4 are an error, never nine rows in silence."""
    with pytest.raises(BatchError, match=r"K=4.*B=10 rows at batch/x.*divides 10"):
        value_and_grad(mean_loss, 4)(jnp.float32(1.0), {"x": jnp.ones((10, 2))})


@pytest.mark.parametrize("size, k", [(10, 4), (7, 3), (1, 4)])
def test_padding_is_exact(size, k):
    """Case 4: fill rows have label -100, hence weight 0, and the gradient is the whole batch's."""
    batch, params = token_batch([4, 0, 1, 2, 0, 3, 1, 4, 2, 1][:size]), token_params()
    want = jax.jit(jax.value_and_grad(token_mean))(params, batch)
    out = accumulated(token_loss, k, pad={"x": 0.0, "labels": IGNORED})(params, batch)
    assert_trees_close((out.value, out.grads), want)
    assert int(out.metrics["n_tokens"]) == (np.asarray(batch["labels"]) != IGNORED).sum()


def test_pad_does_nothing_where_k_divides():
    rows = jax.make_jaxpr(lambda x: micro_batch(x, 0, 2, pad=0.0))(jnp.ones(4))
    assert "concatenate" not in str(rows)


def test_pad_grows_each_leaf_along_its_own_axis():
    batch = {"a": jnp.arange(5.0), "b": jnp.arange(10).reshape(2, 5), "whole": jnp.ones(3)}
    options = {"batch_axes": {"a": 0, "b": 1, "whole": None}, "pad": {"a": -1.0, "b": 7, "whole": None}}
    parts = [micro_batch(batch, i, 3, **options) for i in range(3)]
    assert [part["a"].tolist() for part in parts] == [[0, 3], [1, 4], [2, -1]]
    assert parts[2]["b"].tolist() == [[2, 7], [7, 7]]
    assert all(part["whole"].tolist() == [1, 1, 1] for part in parts)


def test_pad_is_refused_where_padded_rows_would_count():
    batch = {"x": jnp.arange(1.0, 6.0)}
    with pytest.raises(ObjectiveError, match="a bare scalar, whose mean would count the padded rows"):
        value_and_grad(mean_loss, 2, pad=0.0)(jnp.float32(1.0), batch)
    by_shape = lambda w, b: WeightedMean((w * b["x"]).sum(), b["x"].shape[0])  # noqa: E731
    with pytest.raises(ObjectiveError, match="weight of objective term 0 that is the same whatever the rows hold"):
        value_and_grad(by_shape, 2, pad=0.0)(jnp.float32(1.0), batch)
    by_table = lambda w, b: WeightedMean((w * b["x"]).sum(), b["table"].sum())  # noqa: E731
    with pytest.raises(ObjectiveError, match="the same whatever the rows hold"):
        value_and_grad(by_table, 2, pad=0.0, batch_axes={"x": 0, "table": None})(
            jnp.float32(1.0), {**batch, "table": jnp.ones(4)}
        )
    assert float(accumulated(by_shape, 5, pad=0.0)(jnp.float32(1.0), batch).value) == 3.0  # nothing is padded


def test_a_leaf_without_fill_value_is_named():
    with pytest.raises(BatchError, match="B=3 rows at batch/y"):
        micro_batch({"x": jnp.ones(3), "y": jnp.ones(3)}, 0, 2, pad={"x": 0.0, "y": None})


def test_unbatched_leaves_pass_whole_and_keys_are_cut():
    """Case 5: a shared table, of which the leading dimension happens to be B, is not split."""
    batch = {
        "x": jnp.arange(8 * 16, dtype=jnp.float32).reshape(8, 16),
        "table": jnp.arange(32.0).reshape(8, 4),
        "temp": 2.0,
        "key": jax.random.key(3),
        "keys": jax.random.split(jax.random.key(4), 8),
        "mask": None,
    }
    axes = {"x": 0, "table": None, "temp": None, "key": None, "keys": 0, "mask": None}
    shapes = []

    def loss(w, batch):
        shapes.append({name: jnp.shape(leaf) for name, leaf in batch.items() if leaf is not None})
        assert batch["mask"] is None
        noise = jax.vmap(jax.random.uniform)(batch["keys"]) + jax.random.uniform(batch["key"])
        rows = w * batch["temp"] * batch["x"].sum(1) * batch["table"].sum() + noise
        return WeightedMean(rows.sum(), rows.size)

    out = accumulated(loss, 4, batch_axes=axes)(jnp.float32(1.0), batch)
    assert shapes == [{"x": (2, 16), "table": (8, 4), "temp": (), "key": (), "keys": (2,)}]
    noise = jax.vmap(jax.random.uniform)(batch["keys"]).mean() + jax.random.uniform(batch["key"])
    want = 2.0 * np.arange(128).reshape(8, 16).sum(1).mean() * np.arange(32).sum()
    np.testing.assert_allclose([out.grads, out.value], [want, want + noise], rtol=1e-6)


def test_every_example_axis_is_cut_with_a_stride():
    batch = {"rows": jnp.arange(6), "columns": jnp.arange(12).reshape(2, 6), "last": jnp.arange(6).reshape(1, 1, 6)}
    axes = {"rows": 0, "columns": 1, "last": -1}
    for i in range(3):
        part = micro_batch(batch, i, 3, batch_axes=axes)
        assert part["rows"].tolist() == [i, i + 3]
        assert part["columns"].tolist() == [[i, i + 3], [6 + i, 9 + i]]
        assert part["last"].tolist() == [[[i, i + 3]]]
    assert jax.jit(lambda i: micro_batch(batch, i, 3, batch_axes=axes))(jnp.int32(2))["rows"].tolist() == [2, 5]


def test_none_leaves_and_numpy_leaves():
    batch = {"x": np.arange(4), "none": None, "nested": {"y": np.ones((4, 1)), "none": None}}
    loss = lambda w, b: (w * b["x"] * b["nested"]["y"][:, 0]).mean()  # noqa: E731
    for k in (1, 2):
        assert float(value_and_grad(loss, k)(jnp.float32(2.0), batch).value) == 3.0


def test_leaves_that_disagree_are_named():
    with pytest.raises(BatchError, match=r"B=4 at batch/table.*B=8 at batch/x.*K=2"):
        micro_batch({"table": jnp.ones((4, 2)), "x": jnp.ones((8, 2))}, 0, 2)


@pytest.mark.parametrize(
    "batch, options, message",
    [
        ({"x": jnp.ones(4), "temp": 2.0}, {}, "no shape at batch/temp.*batch_axes to None"),
        ({"x": jnp.ones(4), "temp": jnp.ones(())}, {}, r"shape \(\) at batch/temp"),
        ({"x": jnp.ones((4, 2))}, {"batch_axes": 2}, r"example axis 2 .*shape \(4, 2\) at batch/x"),
        ({"x": jnp.ones((4, 2))}, {"batch_axes": -3}, r"example axis -3 .*shape \(4, 2\)"),
        ({"x": jnp.ones(4)}, {"batch_axes": 0.5}, "0.5 for batch/x"),
        ({"x": jnp.ones(4)}, {"batch_axes": {"y": 0}}, "batch_axes to be a pytree prefix"),
        ({"x": jnp.ones(3)}, {"pad": {"y": 0}}, "pad to be a pytree prefix"),
        ({"x": jnp.ones((0, 3))}, {}, "B=0 at batch/x"),
        ({}, {}, "at least one batched leaf"),
        (None, {}, "at least one batched leaf"),
        ({"x": jnp.ones(4)}, {"batch_axes": None}, "at least one batched leaf"),
    ],
)
def test_batches_that_cannot_be_cut(batch, options, message):
    with pytest.raises(BatchError, match=message):
        micro_batch(batch, 0, 2, **options)


@pytest.mark.parametrize("k", [0, -1, 2.0, "2", True, None, float("inf")])
def test_k_is_a_whole_number(k):
    with pytest.raises(ConfigError, match="whole number of at least 1"):
        value_and_grad(mean_loss, k)
    with pytest.raises(ConfigError, match="whole number of at least 1"):
        micro_batch(jnp.ones(4), 0, k)


def test_a_loss_runs_its_python_code_once():
    calls = []

    def loss(w, batch):
        calls.append(batch["x"].shape)
        return LossOutput(WeightedMean(mean_loss(w, batch), 1), {"n": Sum(1)})

    out = accumulated(loss, np.int64(4))(jnp.float32(1.0), {"x": jnp.ones(8)})
    assert calls == [(2,)] and int(out.metrics["n"]) == 4
