"""A loss of several arguments, as `jax.value_and_grad` takes it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.accumulate import value_and_grad
from jaxmem.errors import BatchError, ConfigError, InputError, WorkloadError
from tests.accumulate.problems import assert_trees_close

X = jnp.asarray(np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32))
Y = jnp.asarray(np.random.default_rng(1).normal(size=12).astype(np.float32))
W = jnp.ones(3)


def loss(w, x, y, key=None, *, power=2, table=None):
    error = (x @ w - y) ** power
    error = error if table is None else error * table[:, None].sum()
    return error.mean() if key is None else (error * jax.random.bernoulli(key, 0.5, error.shape)).mean()


@pytest.mark.parametrize("k", [1, 3])
def test_arguments_with_rows_are_cut_and_others_pass_whole(k):
    table = jnp.arange(5.0)
    want = jax.value_and_grad(loss)(W, X, Y, power=4, table=table)
    got = value_and_grad(loss, k, batch_axes=(0, 0))(W, X, Y, power=4, table=table)
    assert_trees_close(tuple(got), want)
    assert_trees_close(tuple(value_and_grad(lambda w, b: loss(w, *b), k)(W, (X, Y))), jax.value_and_grad(loss)(W, X, Y))
    turned = value_and_grad(lambda w, x, y: loss(w, x.T, y), k, batch_axes=(1, 0))(W, X.T, Y)
    assert_trees_close(tuple(turned), jax.value_and_grad(loss)(W, X, Y))


@pytest.mark.parametrize("key", [jax.random.key(7), jax.random.PRNGKey(7)], ids=["typed", "raw"])
@pytest.mark.parametrize("axes", [(0, 0, None), (0, 0)], ids=["declared", "by keyword"])
def test_each_micro_batch_draws_its_own_numbers(key, axes):
    by_name = len(axes) == 2
    call = value_and_grad(loss, 3, batch_axes=axes)
    value, grads = call(W, X, Y, key=key) if by_name else call(W, X, Y, key)
    parts = [jax.value_and_grad(loss)(W, X[i::3], Y[i::3], jax.random.fold_in(key, i)) for i in range(3)]
    assert_trees_close((value, grads), jax.tree.map(lambda *xs: sum(xs) / 3, *parts))


def test_integers_that_are_no_key_stay_what_they_are():
    def shifted(w, x, offsets):
        return ((x @ w + offsets.sum()) ** 2).mean()

    offsets = jnp.arange(2, dtype=jnp.uint32)
    want = jax.value_and_grad(shifted)(W, X, offsets)
    assert_trees_close(tuple(value_and_grad(shifted, 3, batch_axes=(0, None))(W, X, offsets)), want)


def test_python_values_stay_what_they_are():
    def typed(w, x, train, act, record):
        assert train is True and act is jnp.tanh and record["name"] == "run"
        return act(x @ w).mean() * record["scale"]

    record = {"name": "run", "scale": jnp.float32(2.0), "none": None}
    got = value_and_grad(typed, 3)(W, X, True, jnp.tanh, record)
    assert_trees_close(tuple(got), jax.value_and_grad(typed)(W, X, True, jnp.tanh, record))
    bound = functools.partial(loss, power=4)
    assert_trees_close(tuple(value_and_grad(bound, 3, batch_axes=(0, 0))(W, X, Y)), jax.value_and_grad(bound)(W, X, Y))


@pytest.mark.parametrize(
    "args, keywords, options, error, text",
    [
        ((X, Y), {}, {}, BatchError, r"y of shape \(12,\).*batch_axes=\(0, 0\)"),
        ((X, Y, jax.random.key(0)), {}, {}, BatchError, r"batch_axes=\(0, 0, None\)"),
        ((X, jnp.ones((24, 2))), {}, {}, BatchError, r"batch_axes=\(0, None\)"),
        ((X, 0.0), {"table": jnp.ones(12)}, {}, BatchError, "Give table by position"),
        ((X, Y, 1), {}, {"batch_axes": (0, 0)}, BatchError, r"one entry for each of the arguments x, y, key"),
        ((jax.random.key(0), X, Y), {}, {}, BatchError, "a PRNG key"),
        ((X,), {}, {}, InputError, "missing a required argument: 'y'"),
        ((), {}, {}, InputError, r"def loss\(params, batch\)"),
        ((X, Y), {"colour": 1}, {}, InputError, "colour"),
        ((X, Y[:8]), {}, {"batch_axes": (0, 0)}, BatchError, "B=12 at batch/x.*B=8 at batch/y|B=8.*B=12"),
        ((X, Y), {}, {"batch_axes": (0, 0), "wrt": "w"}, ConfigError, "nnx module"),
    ],
)
def test_what_does_not_fit_is_told_with_the_right_line(args, keywords, options, error, text):
    with pytest.raises(error, match=f"(?s){text}"):
        value_and_grad(loss, 3, **options)(W, *args, **keywords)


def test_other_wrong_uses():
    with pytest.raises(BatchError, match="reads none of its rows"):
        value_and_grad(lambda w, b: (X @ w).mean(), 3)(W, X)
    with pytest.raises(WorkloadError, match="Change the order"):
        value_and_grad(lambda batch, params: (batch @ params).mean(), 3)(W, X)
    with pytest.raises(ConfigError, match="Give the loss first"):
        value_and_grad(3, loss)
