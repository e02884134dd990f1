"""Optimizer state in a dtype of its own: which leaves have it, and that nothing else changes."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import MemoryConfig, Precision, WeightedMean, Workload, make_train_step
from jaxmem.errors import ConfigError, PrecisionWithoutEffect
from jaxmem.precision import store_state_in
from jaxmem.train._program import jitted

BF16, F32 = jnp.dtype("bfloat16"), jnp.dtype("float32")
X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32))


def params(dtype=F32):
    return {"layers": [{"w": jnp.full((4, 4), 0.1, dtype)}, {"w": jnp.full((4, 3), 0.1, dtype)}], "b": jnp.zeros(3)}


def loss(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"])
    return WeightedMean(((x + params["b"] - 1) ** 2).sum(), x.size)


def make(optimizer, dtype, *, given=None, k=1, **fields):
    workload = Workload(loss, params() if given is None else given, X, optimizer, **fields)
    return make_train_step(workload, MemoryConfig(accumulation_steps=k, precision=Precision(optimizer=dtype)))


def dtypes(tree):
    return {leaf.dtype for leaf in jax.tree.leaves(tree)}


def num_bytes(tree):
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_case_21_both_moments_of_bfloat16_parameters_are_float32():
    """optax#1552: its `mu_dtype` leaves nu in bfloat16. The state is that of Adam in float32 on the same gradients."""
    given, adam = params(BF16), optax.adamw(1e-2)
    theirs = optax.adamw(1e-2, mu_dtype=F32).init(given)[0]
    assert dtypes(theirs.mu) == {F32} and dtypes(theirs.nu["layers"]) == {BF16}

    @jax.jit
    def by_hand(params, moments):
        gradients = jax.grad(lambda p: loss(p, X).total / 24)(params)
        gradients, masters = jax.tree.map(lambda p: p.astype(F32), (gradients, params))
        updates, moments = adam.update(gradients, moments, masters)
        return jax.tree.map(lambda p, m, u: (m + u).astype(p.dtype), params, masters, updates), moments

    step = make(adam, "float32", given=given)
    state, moments = step.init(), adam.init(jax.tree.map(lambda p: p.astype(F32), given))
    for _ in range(3):
        wanted, moments = by_hand(state.params, moments)
        state, _ = step(state, X)
        got = (state.opt_state[0].mu, state.opt_state[0].nu)
        assert dtypes(got) == {F32} and dtypes(state.params["layers"]) == {BF16}
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(moments[0][1:]), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-12)
        for one, other in zip(jax.tree.leaves(state.params), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one.astype(F32), other.astype(F32), rtol=2**-7)


def test_bfloat16_state_is_half_as_large_donated_and_stable():
    step, wide = make(optax.adam(1e-2), "bfloat16", k=2), make(optax.adam(1e-2), None, k=2)
    state, other = step.init(), wide.init()
    count = 4
    assert num_bytes(state.opt_state) - count == (num_bytes(other.opt_state) - count) // 2
    assert int(state.opt_state[0].count) == 0 and state.opt_state[0].count.dtype == jnp.int32
    saved = wide.compile().memory_analysis().alias_size_in_bytes - step.compile().memory_analysis().alias_size_in_bytes
    assert saved == num_bytes(other.opt_state) - num_bytes(state.opt_state)
    before = step.abstract_state()
    for _ in range(3):
        (state, metrics), (other, want) = step(state, X), wide(other, X)
    assert jax.tree.map(lambda x: x.dtype, state) == jax.tree.map(lambda x: x.dtype, before)
    assert jitted(step.spec)._cache_size() == 1
    np.testing.assert_allclose(metrics["loss"], want["loss"], rtol=1e-2)


class Odd(NamedTuple):
    trace: optax.Params
    quantised: optax.Params
    rows: optax.Params
    rate: jax.Array


def odd():
    """An optimizer with a trace, an 8-bit moment, factored rows and a hyperparameter."""

    def init(params):
        assert dtypes(params) == {F32}  # what it makes of its parameters is made wide
        return Odd(
            trace=jax.tree.map(jnp.zeros_like, params),
            quantised=jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.int8), params),
            rows=jax.tree.map(lambda p: jnp.ones((1, *p.shape[1:])), params),
            rate=jnp.float32(0.5),
        )

    def update(updates, state, params=None):
        assert dtypes(updates) == dtypes(state.trace) == dtypes(params) == {F32}
        trace = jax.tree.map(lambda g, t: g + 0.9 * t, updates, state.trace)
        return jax.tree.map(lambda t: -state.rate * t, trace), state._replace(trace=trace)

    return optax.GradientTransformation(init, update)


def test_only_floating_leaves_shaped_like_their_parameter_are_stored_so():
    given = {"w": jnp.ones((3, 4), BF16), "b": jnp.ones(4, BF16)}
    optimizer = store_state_in(odd(), BF16)
    state = optimizer.init(given)
    gradients = jax.tree.map(jnp.ones_like, given)
    for _ in range(2):
        updates, state = optimizer.update(gradients, state, given)
        assert dtypes(state.trace) == {BF16} and dtypes(state.quantised) == {jnp.dtype("int8")}
        assert dtypes(state.rows) == {F32} and state.rate.dtype == F32
    assert dtypes(updates) == {F32}
    np.testing.assert_allclose(updates["w"], -0.95, rtol=1e-6)  # 1.9 is 1.8984 in bfloat16: stored, not applied


@pytest.mark.parametrize(
    "optimizer, narrow, wide",
    [
        (lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2), 6, 0),
        (lambda: optax.multi_transform({"a": optax.adam(1e-2), "b": optax.sgd(0.1)}, {"layers": "a", "b": "b"}), 4, 0),
        (lambda: optax.masked(optax.adam(1e-2), {"layers": [False, True], "b": True}), 4, 0),
        (lambda: optax.chain(optax.trace(0.9), optax.ema(0.9), optax.sgd(0.1)), 6, 0),
        (lambda: optax.MultiSteps(optax.adam(1e-2), 2).gradient_transformation(), 6, 3),
        (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2), 1, 1),  # v of the bias; a column of (4, 3)
    ],
    ids=["inject_hyperparams", "multi_transform", "masked", "chain", "MultiSteps", "adafactor"],
)
def test_wrapped_optimizers(optimizer, narrow, wide):
    """`wide` counts float32 leaves of the parameters' shapes: the gradient sums of MultiSteps."""
    step = make(optimizer(), "bfloat16")
    state = step.init()
    state, _ = step(state, X)
    kept = [leaf.dtype for leaf in jax.tree.leaves(state.opt_state)]
    assert kept.count(BF16) == narrow
    shapes = [leaf.shape for leaf in jax.tree.leaves(state.opt_state) if leaf.dtype == F32]
    assert shapes.count((4, 4)) + shapes.count((4, 3)) + shapes.count((3,)) == wide
    if hasattr(state.opt_state, "hyperparams"):
        assert state.opt_state.hyperparams["learning_rate"].dtype == F32


def test_a_single_array_of_parameters():
    for given, narrow in ((jnp.ones(4), 2), (jnp.float32(1.0), 0)):
        workload = Workload(lambda w, x: jnp.mean((x.sum() * w) ** 2), given, X, optax.adam(1e-2))
        step = make_train_step(workload, MemoryConfig(precision=Precision(optimizer="bfloat16")))
        if narrow:
            assert [leaf.dtype for leaf in jax.tree.leaves(step.init().opt_state)].count(BF16) == narrow
        else:  # a scalar in the state might be anything, a learning rate for one
            with pytest.raises(PrecisionWithoutEffect):
                step.init()


def test_frozen_parameters_have_no_state():
    step = make(optax.adam(1e-2), "bfloat16", trainable="layers/0")
    state, _ = step(step.init(), X)
    assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state.opt_state[0].nu)] == [((4, 4), BF16)]


def test_an_optimizer_without_such_state_is_refused():
    for optimizer in (optax.sgd(0.1), optax.sgd(optax.constant_schedule(0.1))):
        with pytest.raises(PrecisionWithoutEffect, match="plain SGD.*Leave precision.optimizer out"):
            make(optimizer, "bfloat16").init()


@pytest.mark.parametrize("dtype", ["float16", "float8_e4m3fn"])
def test_a_dtype_without_the_range_is_refused(dtype):
    with pytest.raises(ConfigError, match="float32, bfloat16, float64; got.*squares of gradients"):
        Precision(optimizer=dtype)


def test_json_round_trips():
    for dtype in (None, "float32", jnp.bfloat16):
        config = MemoryConfig(precision=Precision(optimizer=dtype, compute="bfloat16"))
        assert MemoryConfig.from_json(config.to_json()) == config
    assert MemoryConfig(precision=Precision(optimizer="bfloat16")) != MemoryConfig()
