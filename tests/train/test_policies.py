"""`compare(loss, policies=...)`: one loss of the user's own loop, a row a policy."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from jaxmem import LossOutput, Policy, WeightedMean, Workload, compare, make_train_step, remat
from jaxmem.errors import InputError, RematWithoutEffect, UnknownPolicyError

SHAPES = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 3, {"x": jax.ShapeDtypeStruct((64, 32), jnp.float32)}


def loss(weights, batch, scale=1.0):
    x = batch["x"]
    for w in weights:
        x = jnp.tanh(jnp.tanh(x) @ w)
    return scale * (x**2).mean()


@pytest.mark.parametrize(
    "fn",
    [
        loss,
        jax.jit(loss),
        lambda weights, batch: (loss(weights, batch), batch["x"]),
        lambda weights, batch: LossOutput(WeightedMean(loss(weights, batch), 2.0)),
    ],
    ids=["plain", "jitted", "aux", "objective"],
)
def test_rows_are_the_value_and_gradient_of_the_loss(fn):
    table = compare(fn, policies=["none", "full", "auto:0.5"], args=SHAPES, target="cpu")
    none, full, half = table.rows
    assert [row.name for row in table.rows] == [row.remat for row in table.rows] == ["none", "full", "auto:0.5"]
    everything = remat.residual_bytes(loss, *SHAPES)  # a share is one of a derivative by all arguments
    assert full.saved_residual_bytes < half.saved_residual_bytes <= everything / 2 < none.saved_residual_bytes
    assert none.saved_residual_bytes == remat.residual_bytes(lambda w: loss(w, {"x": jnp.ones((64, 32))}), SHAPES[0])
    assert dict(none.by_kind)["parameters"] == 3 * 32 * 32 * 4 and none.flops > 2 * none.forward_flops


def test_policies_may_have_names_and_a_workload_takes_them_too():
    named = {"plain": "none", "mine": Policy(dots="all")}
    assert [row.name for row in compare(loss, *SHAPES, policies=named, target="cpu").rows] == ["plain", "mine"]
    workload = Workload(loss, *SHAPES, optax.sgd(0.1))
    assert [row.remat for row in compare(workload, policies=["none", "full"], target="cpu").rows] == ["none", "full"]


def test_python_values_and_nnx_modules_are_arguments():
    def scaled(weights, batch, train, act):
        assert train is True
        return act(loss(weights, batch))

    compare(scaled, policies=["full"], args=(*SHAPES, True, jnp.tanh), target="cpu")

    class Net(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(32, 32, rngs=rngs) for _ in range(3)])
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def of_module(model, batch):
        x = batch["x"]
        for layer in model.layers:
            x = jnp.tanh(layer(model.dropout(jnp.tanh(x))))
        return (x**2).mean(), x

    none, full = compare(of_module, policies=["none", "full"], args=(Net(), SHAPES[1]), target="cpu").rows
    assert full.saved_residual_bytes < 0.3 * none.saved_residual_bytes


def step(state, batch):
    return state.apply_gradients(grads=jax.grad(loss)(state.params, batch)), 0.0


STATE = TrainState.create(apply_fn=loss, params=[jnp.ones((32, 32))], tx=optax.sgd(0.1))


@pytest.mark.parametrize(
    "call, error, text",
    [
        (lambda: compare(step, policies=["full"], args=(STATE, SHAPES[1])), InputError, "a TrainState.*lean_step"),
        (lambda: compare(lambda w, b: b["x"] @ w[0], policies="full", args=SHAPES), InputError, r"float32\[64, 32\]"),
        (lambda: compare(loss, *SHAPES), InputError, "policies=\\['none', 'full', 'dots'\\]"),
        (lambda: compare(loss, policies=["none", "ful"], args=SHAPES), UnknownPolicyError, "'ful'"),
        (lambda: compare(loss, policies=["full"], args=SHAPES[:1]), InputError, "missing a required argument: 'batch'"),
        (lambda: compare(loss, policies=["full"]), InputError, "missing a required argument|no arguments"),
        (
            lambda: compare(make_train_step(Workload(loss, *SHAPES, optax.sgd(0.1))), policies=["full"]),
            InputError,
            "a TrainStep",
        ),
        (
            lambda: compare(lambda w, b: (b["x"] @ w[0]).mean(), policies=["full"], args=SHAPES, target="cpu"),
            RematWithoutEffect,
            "something to wrap",
        ),
    ],
)
def test_what_has_no_policy_is_told_with_the_right_line(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("policies", [1, [], {}])
def test_policies_that_are_no_list_are_refused(policies):
    with pytest.raises(InputError, match="policies to be a list"):
        compare(lambda w, b: (b["x"] @ w[0]).mean(), policies=policies, args=SHAPES, target="cpu")
