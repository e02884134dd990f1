"""A step with a loss scale: what the optimizer sees, what a skipped window leaves untouched, and what the loop says."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxmem import LossOutput, MemoryConfig, Precision, Sum, WeightedMean, Workload, make_train_step, train_loop
from jaxmem.errors import MetricError, NonFiniteError, StateError, TooManySkippedWindows
from jaxmem.precision import DynamicLossScale, start_loss_scale
from jaxmem.train import verify
from jaxmem.train._program import jitted

K = 4
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32))
PLAIN = MemoryConfig(accumulation_steps=K)
SCALED = MemoryConfig(accumulation_steps=K, precision=Precision(compute="float16", loss_scale="dynamic"))


def overflowing(batch, micro=2):
    """The batch with rows of micro-batch `micro` that float16 can hold, and whose squares it cannot."""
    return batch.at[micro::K].multiply(1e4)


def loss(params, x):
    y = (jnp.tanh(x @ params["hidden"]) @ params["out"] + (x**2).mean(1) - 4) / 2
    return WeightedMean((y**2).astype(jnp.float32).sum(), y.size)


def workload(optimizer=None, **fields):
    params = {"hidden": jnp.eye(4) + 0.1, "out": jnp.ones(4)}
    optimizer = optimizer or optax.chain(optax.clip_by_global_norm(1.0), optax.adam(0.05))
    return Workload(fields.pop("loss_fn", loss), params, X, optimizer, **fields)


@functools.cache
def made(config):
    """The step of the plain workload, compiled once for all tests."""
    return make_train_step(workload(), config)


def bits(tree):
    """Every leaf as its path, dtype and bytes."""
    data = jax.tree.map(lambda x: jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x, tree)
    return [(str(p), x.dtype, np.asarray(x).tobytes()) for p, x in jax.tree_util.tree_leaves_with_path(data)]


def kept(state):
    """What a skipped window may not touch."""
    return bits((state.step, state.params, state.opt_state, state.state))


# -- case 23 ---------------------------------------------------------------------------------------


def test_case_23_clipping_acts_on_the_unscaled_gradient():
    """Swin#311: the gradient's norm is 1.8, and what reaches the optimizer 1: clipped first, it would be 2**-15."""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))
    got, want = (make_train_step(workload(clipped), config) for config in (SCALED, PLAIN))
    one, other = got.init(), want.init()
    for _ in range(3):
        (one, metrics), (other, _) = got(one, X), want(other, X)
    assert float(metrics["loss_scale"]) == 2.0**15 and int(one.skipped) == 0
    for name, leaf in one.params.items():
        np.testing.assert_allclose(leaf, other.params[name], rtol=5e-3, atol=1e-3)
        assert leaf.dtype == jnp.float32
    moved = jax.tree.map(jnp.subtract, got(got.init(), X)[0].params, got.init().params)
    assert float(optax.tree.norm(moved)) == pytest.approx(0.1, rel=1e-4)


def test_case_23_an_overflow_skips_the_whole_window():
    step = made(SCALED)
    state, _ = step(step.init(), X)
    before, moments = kept(state), state.opt_state[1][0]
    assert int(moments.count) == 1 and all(np.any(leaf) for leaf in jax.tree.leaves(moments.nu))
    state, metrics = step(state, overflowing(X))
    assert kept(state) == before  # parameters, moments and their count, to the bit
    assert (int(state.step), int(state.window), int(state.skipped), bool(state.last_finite)) == (1, 2, 1, False)
    assert float(metrics["loss_scale"]) == 2.0**15  # that of the whole window
    assert float(state.loss_scale.scale) == 2.0**14  # once, though three micro-batches follow
    assert not np.isfinite(metrics["loss"]) and int(metrics["skipped"]) == 1
    state, metrics = step(state, X)
    assert (int(state.step), int(state.skipped), bool(state.last_finite)) == (2, 1, True)
    assert float(metrics["loss_scale"]) == float(state.loss_scale.scale) == 2.0**14
    plain = made(PLAIN)
    want, _ = plain(plain.init(), X)
    want, _ = plain(want, X)
    for name, leaf in state.params.items():
        np.testing.assert_allclose(leaf, want.params[name], rtol=5e-3, atol=1e-3)


def test_the_scale_grows_and_nothing_is_traced_again():
    traces = []

    def counting(params, x):
        traces.append(None)
        return loss(params, x)

    spec = DynamicLossScale(initial=4, growth_interval=2, max=8)
    config = dataclasses.replace(SCALED, precision=Precision(compute="float16", loss_scale=spec))
    step = make_train_step(workload(optax.sgd(0.1), loss_fn=counting), config)
    state, read, traced = step.init(), [], 0
    for window in range(6):
        state, metrics = step(state, overflowing(X) if window == 3 else X)
        read.append(metrics)
        traced = traced or len(traces)
    assert [float(metrics["loss_scale"]) for metrics in read] == [4, 4, 8, 8, 4, 4]
    assert [int(metrics["skipped"]) for metrics in read] == [0, 0, 0, 1, 1, 1]  # not donated with the state
    assert float(state.loss_scale.scale) == 8
    assert len(traces) == traced and jitted(step.spec)._cache_size() == 1


def test_a_scale_rescues_gradients_that_float16_would_lose():
    tiny = lambda w, x: WeightedMean((x[:, 0] * w).astype(jnp.float32).sum() * 1e-9, 1.0)  # noqa: E731
    moved = []
    for scale in (1, "dynamic"):
        given = Workload(tiny, jnp.float32(0), jnp.ones((8, 1)), optax.sgd(1e8))
        step = make_train_step(given, MemoryConfig(precision=Precision(compute="float16", loss_scale=scale)))
        moved.append(float(step(step.init(), given.batch)[0].params))
    assert moved[0] == 0.0 and moved[1] == pytest.approx(-0.8, rel=1e-2)


def test_without_a_scale_the_step_selects_and_skips_nothing():
    plain, scaled = made(PLAIN), make_train_step(workload(), MemoryConfig(precision=Precision(loss_scale=1)))
    text, other = (each.lower().as_text() for each in (plain, scaled))
    leaves = len(jax.tree.leaves((plain.abstract_state().params, plain.abstract_state().opt_state)))
    assert other.count("call @_where") >= text.count("call @_where") + leaves
    assert (text.count("is_finite"), other.count("is_finite")) == (1, 3)  # of the loss, and of two gradients
    state, metrics = plain(plain.init(), X)
    assert state.loss_scale is None and set(metrics) == {"loss"}
    state, _ = plain(state, X * jnp.nan)
    assert not bool(state.last_finite) and (int(state.step), int(state.skipped)) == (2, 0)
    assert np.isnan(state.params["out"]).all()


def test_the_scaled_state_is_donated():
    step = made(SCALED)
    state = step.init()
    step(state, X)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state) if leaf is not state.last_finite)


def test_frozen_parameters_and_bfloat16_are_skipped_alike():
    config = MemoryConfig(accumulation_steps=K, precision=Precision(compute="bfloat16", loss_scale=1.0))
    step = make_train_step(workload(optax.sgd(0.1, momentum=0.9), trainable="out"), config)
    state, _ = step(step.init(), X)
    before = kept(state)
    state, _ = step(state, X.at[2, 1].set(jnp.nan))
    assert kept(state) == before and int(state.skipped) == 1 and float(state.loss_scale.scale) == 1.0
    state, _ = step(state, X)
    assert kept(state) != before and int(state.step) == 2


# -- model state -----------------------------------------------------------------------------------


class Normed(nn.Module):
    dtype: object

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(4, dtype=self.dtype)(x * x)
        return nn.BatchNorm(use_running_average=False, dtype=self.dtype)(x)


def test_batch_norm_statistics_are_restored_with_the_window():
    step = make_train_step(
        Workload.from_linen(
            lambda memory: Normed(memory.compute_dtype),
            lambda model, x, *, memory: jnp.mean(model(x.astype(memory.compute_dtype)).astype(jnp.float32) ** 4),
            X,
            optax.sgd(1e-2, momentum=0.9),
        ),
        SCALED,
    )
    state, _ = step(step.init(), X)
    before = kept(state)
    unguarded = jax.jit(step.spec.loss())(state.params, overflowing(X)[2::K], rng=state.rng, state=state.state)
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(unguarded.state))
    state, _ = step(state, overflowing(X))
    assert kept(state) == before and int(state.skipped) == 1
    state, _ = step(state, X)
    assert int(state.step) == 2 and kept(state) != before


class Dropped(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.drop = nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(self.norm(x))


def test_random_numbers_are_consumed_by_a_skipped_window():
    """nnx: the statistics are restored, and the dropout stream has gone on by K draws."""
    given = Workload.from_nnx(Dropped(nnx.Rngs(0)), lambda model, x: jnp.mean(model(x * x) ** 2), X, optax.sgd(0.1))
    step = make_train_step(given, SCALED)
    state, _ = step(step.init(), X)
    statistics, count = bits(state.state["norm"]), int(state.state["drop"]["rngs"]["count"][...])
    structure = jax.tree.structure(state)
    state, _ = step(state, overflowing(X))
    assert int(state.skipped) == 1 and bits(state.state["norm"]) == statistics
    assert int(state.state["drop"]["rngs"]["count"][...]) == count + K == 2 * K
    assert jax.tree.structure(state) == structure


def test_keys_of_a_loss_are_consumed_too_and_its_counters_restored():
    def drawing(w, x, *, state):
        key, draw = jax.random.split(state["key"])
        value = jnp.mean((x * x * w) ** 2) + 0 * jax.random.uniform(draw)
        return LossOutput(value, state={"key": key, "seen": state["seen"] + 1})

    given = Workload(drawing, jnp.float32(1), X, optax.sgd(0.1), state={"key": jax.random.key(1), "seen": jnp.int32(0)})
    step = make_train_step(given, SCALED)
    state, _ = step(step.init(), overflowing(X))
    assert int(state.skipped) == 1 and int(state.state["seen"]) == 0
    assert state.state["key"] != jax.random.key(1)


# -- refusals --------------------------------------------------------------------------------------


def test_a_state_without_a_scale_says_how_to_get_one():
    plain, scaled = made(PLAIN), made(SCALED)
    with pytest.raises(StateError, match="start_loss_scale"):
        scaled(plain.init(), X)
    state = dataclasses.replace(plain.init(), loss_scale=start_loss_scale(SCALED.dtypes.loss_scale))
    assert int(scaled(state, X)[0].step) == 1
    assert plain(scaled.init(), X)[0].loss_scale is None  # going on without one needs nothing


@pytest.mark.parametrize("name", ["loss_scale", "skipped"])
def test_the_names_of_its_metrics_are_taken_only_where_it_scales(name):
    named = lambda params, x: LossOutput(loss(params, x), {name: Sum(1.0)})  # noqa: E731
    with pytest.raises(MetricError, match=name):
        make_train_step(workload(loss_fn=named), SCALED).lower()
    make_train_step(workload(loss_fn=named), MemoryConfig()).trace()


# -- verify and the loop ---------------------------------------------------------------------------


def test_verify_finds_the_gradients_of_a_scale_that_has_to_back_off_first():
    spec = DynamicLossScale(initial=2.0**24)
    config = dataclasses.replace(SCALED, precision=Precision(compute="float16", loss_scale=spec))
    step = make_train_step(workload(), config)
    assert int(step(step.init(), X)[0].skipped) == 1
    found = verify(step, target="cpu")
    assert found["gradients"].verdict == "pass" and found.tolerance_dtype == "float16", str(found)


def data(bad):
    return lambda window: overflowing(X) if bad(window) else X


def test_the_loop_goes_on_after_a_skipped_window(tmp_path):
    step, path = made(SCALED), tmp_path / "metrics.jsonl"
    state = train_loop(step, step.init(), data({0, 3}.__contains__), 5, log_every=1, metrics_path=str(path))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["skipped"] for line in lines] == [1, 1, 1, 2, 2]
    assert [line["loss"] is None for line in lines] == [True, False, False, True, False]
    assert [line["loss_scale"] for line in lines] == [2**15, 2**14, 2**14, 2**14, 2**13]
    assert [line["step"] for line in lines] == [0, 1, 2, 2, 3] and int(state.window) == 5


def test_too_many_skipped_in_a_row_stop_the_loop():
    step = made(SCALED)
    with pytest.raises(TooManySkippedWindows) as caught:
        train_loop(step, step.init(), data(lambda w: w >= 2), 20, log_every=1, max_skipped=3)
    assert "4 skipped in a row at step 2 (window 5), the loss scale down to 2048" in str(caught.value)
    assert "bfloat16" in caught.value.do and isinstance(caught.value, NonFiniteError)
    every_other = data(lambda w: w % 2 == 0)
    assert int(train_loop(step, step.init(), every_other, 9, log_every=1, max_skipped=1).skipped) == 5


def test_a_metric_that_is_nan_though_no_window_was_skipped_still_stops_the_loop():
    named = lambda w, x: LossOutput((w * x).mean(), {"extra": Sum(jnp.nan)})  # noqa: E731
    step = make_train_step(Workload(named, jnp.float32(1), X, optax.sgd(0.1)), MemoryConfig(precision="float16"))
    with pytest.raises(NonFiniteError, match="NaN in 'extra'"):
        train_loop(step, step.init(), data(lambda w: False), 1)


# -- on a mesh -------------------------------------------------------------------------------------


def test_an_overflow_on_one_shard_skips_the_window_on_all():
    """Two micro-batches on four devices: the bad row is on one of them, the moments are sharded and stay so."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    config = MemoryConfig(accumulation_steps=2, gradient_reduction="once", precision="float16")
    step = make_train_step(workload(optax.sgd(0.05, momentum=0.9)), config, mesh=mesh)
    state, _ = step(step.init(), X)
    before, shardings = kept(state), jax.tree.map(lambda x: x.sharding, state)
    state, metrics = step(state, X.at[5].multiply(1e4))
    assert kept(state) == before and int(state.skipped) == 1 and float(metrics["loss_scale"]) == 2.0**15
    assert jax.tree.map(lambda x: x.sharding, state) == shardings
    state, _ = step(state, X)
    assert (int(state.step), float(state.loss_scale.scale)) == (2, 2.0**14)
