"""`analyze` of a step as it is called: methods, partials, keywords, and nnx objects."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxmem
from jaxmem.errors import InputError

STATE = {"w": jax.ShapeDtypeStruct((64, 64), jnp.float32), "m": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
X = jax.ShapeDtypeStruct((8, 64), jnp.float32)
STATE_BYTES, X_BYTES = 2 * 64 * 64 * 4, 8 * 64 * 4


@functools.partial(jax.jit, donate_argnames="state", static_argnames="train")
def step(state, x, *, scale=1.0, train=True):
    grad = jax.grad(lambda w: scale * ((x @ w) ** 2).mean())(state["w"])
    moment = 0.9 * state["m"] + grad
    return {"w": state["w"] - moment if train else state["w"], "m": moment}


class Trainer:
    rate = 0.5

    @functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
    def step(self, state, x):
        return step(state, x, scale=self.rate)

    def plain(self, state, x):
        return step(state, x)


CALLS = {
    "positional": lambda: jaxmem.analyze(step, STATE, X, target="cpu"),
    "by name": lambda: jaxmem.analyze(step, STATE, x=X, target="cpu"),
    "all by name": lambda: jaxmem.analyze(step, x=X, state=STATE, train=True, target="cpu"),
    "partial": lambda: jaxmem.analyze(functools.partial(step, train=True), STATE, X, target="cpu"),
    "partial of arrays": lambda: jaxmem.analyze(functools.partial(step, STATE), X, target="cpu"),
    "method": lambda: jaxmem.analyze(Trainer().step, STATE, X, target="cpu"),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_the_jitted_function_donates_is_donated(name):
    report = CALLS[name]()
    assert report.argument_bytes == STATE_BYTES + X_BYTES
    assert report.alias_bytes == STATE_BYTES


def test_a_method_that_is_not_jitted_is_jitted_as_it_is():
    assert jaxmem.analyze(Trainer().plain, STATE, X, target="cpu").argument_bytes == STATE_BYTES + X_BYTES


class Net(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(64, 64, rngs=rngs), nnx.Linear(64, 64, rngs=rngs)
        self.second.kernel = self.first.kernel  # tied
        self.norm, self.dropout = nnx.BatchNorm(64, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(self.norm(self.first(x))))


def made():
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)


def nnx_step(model, optimizer, x):
    value, grads = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
    optimizer.update(model, grads)
    return value


@pytest.mark.parametrize("shapes", [False, True], ids=["arrays", "shapes"])
@pytest.mark.parametrize("donate", [(), (0, 1)], ids=["kept", "donated"])
def test_an_nnx_step_is_what_nnx_compiles(shapes, donate):
    jitted = nnx.jit(nnx_step, donate_argnums=donate)
    model, optimizer = nnx.eval_shape(made) if shapes else made()
    report = jaxmem.analyze(jitted, model, optimizer, X, target="cpu")
    truth = jitted.lower(*made(), jnp.ones(X.shape)).compile().compiled.memory_analysis()
    assert report.argument_bytes == truth.argument_size_in_bytes  # the tied kernel counts once
    assert report.alias_bytes == truth.alias_size_in_bytes
    assert (report.alias_bytes > 0) == bool(donate)


def test_an_nnx_step_that_is_not_jitted_keeps_its_updates():
    plain = jaxmem.analyze(nnx_step, *made(), X, target="cpu")
    assert plain.output_bytes == jaxmem.analyze(nnx.jit(nnx_step), *made(), x=X, target="cpu").output_bytes
    assert plain.output_bytes > 3 * 64 * 64 * 4


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: jaxmem.analyze(step, STATE), "missing a required argument: 'x'"),
        (lambda: jaxmem.analyze(step, STATE, X, targt="cpu"), "targt"),
        (lambda: jaxmem.analyze(nn.Dense(3), X), r"analyze\(model.apply, variables, x\)"),
        (lambda: jaxmem.analyze(jax.jit(jnp.sin).lower(1.0), x=X), "Leave them out"),
    ],
)
def test_calls_that_do_not_fit_are_told(call, text):
    with pytest.raises(InputError, match=text):
        call()
