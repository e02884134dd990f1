"""nnx objects among a block's arguments are updated as without the block; those of an outer trace stay readable."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxmem import MemoryConfig, Workload, make_train_step
from jaxmem.errors import InputError
from jaxmem.policy import Policy
from jaxmem.remat import checkpoint
from tests.remat.test_nnx import assert_same, plain

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32))


class Layer(nnx.Module):
    """BatchNorm and Dropout: statistics and RNG counts change with each call."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, other=None):
        return self.dropout(self.norm(x if other is None else other(x)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Holder:
    module: nnx.Module
    scale: jax.Array


def counted(variable, x):
    variable[...] = variable[...] + 1
    return x


def drawn(rngs, x):
    return x * jax.random.bernoulli(rngs(), shape=x.shape)


def shifted(state, x):
    state["norm"]["mean"][...] += 1
    return x


full = functools.partial(checkpoint, policy="full")
# A call of a block on (module, another module).
CALLS = {
    "argument": lambda wrap, m, o: wrap(lambda m, x: m(x))(m, X),
    "keyword": lambda wrap, m, o: wrap(lambda x, *, m: m(x))(X, m=m),
    "static_argnames": lambda wrap, m, o: wrap(lambda x, scale, m: m(x) * scale)(X, scale=jnp.float32(2), m=m),
    "list": lambda wrap, m, o: wrap(lambda ms, x: ms[1](ms[0](x)))([m, o], X),
    "nnx.List": lambda wrap, m, o: wrap(lambda ms, x: ms[0](x))(nnx.List([m]), X),
    "dataclass": lambda wrap, m, o: wrap(lambda h: h.module(X) * h.scale)(Holder(m, jnp.float32(2))),
    "twice": lambda wrap, m, o: wrap(lambda a, b, x: a(b(x)))(m, m, X),
    "to a module": lambda wrap, m, o: wrap(m)(X, o),
    "to a method": lambda wrap, m, o: wrap(m.__call__)(X, other=o),
    "Variable": lambda wrap, m, o: wrap(counted)(m.norm.mean, X),
    "State": lambda wrap, m, o: wrap(shifted)(nnx.state(m), X),
    "RngStream": lambda wrap, m, o: wrap(drawn)(m.dropout.rngs, X),
}


@pytest.mark.parametrize("call", CALLS)
def test_what_a_block_does_to_its_arguments_is_done(call):
    def run(wrap):
        m, o = Layer(nnx.Rngs(0)), Layer(nnx.Rngs(1))
        before = plain(nnx.state((m, o)))
        out = CALLS[call](wrap, m, o)
        return {"out": np.asarray(out), **plain(nnx.state((m, o)))}, before

    (got, _), (want, before) = run(full if call != "static_argnames" else static_scale), run(lambda block: block)
    assert_same(got, want)
    assert any((want[name] != before[name]).any() for name in before)


def static_scale(block):
    return checkpoint(block, "full", static_argnames=("scale",))


def test_a_block_of_modules_in_nnx_scan():
    def run(wrap):
        layers = nnx.vmap(lambda key: Layer(nnx.Rngs(key)))(jax.random.split(jax.random.key(0), 3))
        body = wrap(lambda x, layer: layer(x))
        x = nnx.scan(body, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(X, layers)
        return {"x": np.asarray(x), **plain(nnx.state(layers))}

    assert_same(run(functools.partial(full, scanned=True)), run(lambda body: body))


def test_a_returned_module_is_the_one_that_was_given():
    layer = Layer(nnx.Rngs(0))
    assert checkpoint(lambda m, x: (m, x), "full")(layer, X)[0] is layer
    assert checkpoint(lambda m, x: (m, x), Policy(save=("re:a?",)))(layer, X)[0] is layer


def test_a_module_of_an_outer_trace_is_read_and_not_changed():
    """nnx.remat would raise, and leave the module without its variables."""
    linear, layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), Layer(nnx.Rngs(0))
    grads = jax.jit(jax.grad(lambda x: full(linear)(jnp.sin(x)).sum()))(X)
    np.testing.assert_allclose(grads, jax.grad(lambda x: linear(jnp.sin(x)).sum())(X), rtol=1e-5)
    scanned, _ = jax.lax.scan(lambda x, _: (full(lambda m, x: m(x))(linear, x), None), X, length=2)
    np.testing.assert_allclose(scanned, linear(linear(X)), rtol=1e-5)
    with pytest.raises(Exception, match="Cannot mutate") as raised:
        jax.jit(full(layer))(X)
    assert type(raised.value).__name__ == "TraceContextError"
    assert (layer.norm.mean[...] == 0).all()


@pytest.mark.parametrize("held", ["closure", "partial", "list"])
def test_a_changed_module_in_a_closure_is_refused_with_the_way_to_do_it(held):
    layer = Layer(nnx.Rngs(0))
    layers = [layer]
    blocks = {
        "closure": lambda x: layer(x),
        "partial": functools.partial(lambda m, x: m(x), layer),
        "list": lambda x: layers[0](x),
    }
    with pytest.raises(InputError, match=r"closes over Layer\. Pass the module to the block: memory\.block\("):
        full(blocks[held])(X)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, layer):
        return layer(nn.Dense(4)(x))


def test_an_nnx_object_in_a_linen_block():
    def run(cls):
        layer = Layer(nnx.Rngs(0))
        out, variables = cls().init_with_output(jax.random.key(0), X, layer)
        return {"out": np.asarray(out), **plain(variables), **plain(nnx.state(layer))}

    assert_same(run(full(LinenBlock)), run(LinenBlock))


def test_a_train_step_whose_blocks_take_modules():
    """The statistics and RNG counts of `from_nnx` are those of the step without remat."""

    class Model(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.linear, self.layers = nnx.Linear(4, 4, rngs=rngs), nnx.List([Layer(rngs), Layer(rngs)])

    def loss(model, batch, memory):
        for layer in model.layers:
            batch = memory.block(lambda linear, x, layer: layer(jnp.tanh(linear(x))))(model.linear, batch, layer=layer)
        return (batch**2).mean()

    def run(remat):
        step = make_train_step(
            Workload.from_nnx(Model(), loss, X, optax.sgd(0.1)), MemoryConfig(remat=remat, accumulation_steps=2)
        )
        state, metrics = step(step.init(), X)
        return {"loss": np.asarray(metrics["loss"]), **plain(state.params), **plain(state.state)}

    assert_same(run("full"), run("none"))
