"""`checkpoint` round nnx classes, instances and bound methods: state is updated once, gradients are the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxmem.errors import InputError
from jaxmem.remat import checkpoint, residual_bytes

X = jnp.asarray(np.random.default_rng(0).normal(size=(6, 4)).astype(np.float32))


class Block(nnx.Module):
    """Linear, BatchNorm and Dropout, with a train flag and an optional mask."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, mask=None, *, train=False, scale=1.0):
        y = self.norm(self.linear(x), use_running_average=not train)
        y = self.dropout(jnp.tanh(y), deterministic=not train) * scale
        return x + (y if mask is None else y * mask)

    def features(self, x, *, train):
        return self(x, train=train) ** 2


CALLS = {
    "train": lambda block, x: block(x, train=True),
    "default": lambda block, x: block(x, None, scale=0.5),
    "mask and traced scale": lambda block, x: block(x, jnp.arange(4.0), train=True, scale=jnp.float32(0.5)),
}


def run(call, wrap=lambda block: block, make=Block):
    """Gradients, and the state of the module afterwards, as plain numpy leaves."""
    block = make(nnx.Rngs(0))
    loss = lambda block, x: (call(wrap(block), call(wrap(block), x)) ** 2).sum()  # noqa: E731
    grads = nnx.jit(nnx.grad(loss))(block, X)
    return plain(grads), plain(nnx.state(block))


@functools.cache
def plain_run(call):
    return run(CALLS[call])


def plain(state):
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(jax.random.key_data(x) if is_key(x) else x)
        for path, x in leaves
    }


def assert_same(got, want):
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("call", CALLS)
def test_gradients_and_state_are_unchanged(call):
    """Cases 6 and 9: statistics and RNG counts advance once a call, not twice because of the recomputation."""
    got, want = run(CALLS[call], lambda block: checkpoint(block, "full")), plain_run(call)
    for g, w in zip(got, want, strict=True):
        assert_same(g, w)
    trained = call != "default"
    (count,) = [value for name, value in want[1].items() if "count" in name]
    assert int(count) == 2 * trained
    (mean,) = [value for name, value in want[1].items() if name.startswith("norm/mean")]
    assert (mean != 0).any() == trained


@pytest.mark.parametrize(
    "options",
    [{"wrap": lambda block: checkpoint(block.__call__, "dots")}, {"make": checkpoint(Block, "full")}],
    ids=["bound method", "class"],
)
def test_bound_methods_and_classes(options):
    for g, w in zip(run(CALLS["train"], **options), plain_run("train"), strict=True):
        assert_same(g, w)


def test_another_method_than_call():
    block = Block(nnx.Rngs(0))
    features = checkpoint(block.features, "full")
    assert features.__name__ == "features"
    np.testing.assert_allclose(features(X, train=False), Block(nnx.Rngs(0))(X) ** 2, rtol=1e-6)


def test_the_class_is_made_once_and_keeps_its_face():
    wrapped = checkpoint(Block, "full")
    assert checkpoint(Block, "full") is wrapped is not checkpoint(Block, "dots")
    assert (wrapped.__name__, wrapped.__doc__) == ("Block", Block.__doc__) and issubclass(wrapped, Block)
    graph, state = nnx.split(wrapped(nnx.Rngs(0)))
    assert isinstance(nnx.merge(graph, state), Block)


@pytest.mark.parametrize("preset, per_block", [("full", 0), ("dots", 1)])
def test_blocks_keep_less(preset, per_block):
    graph, params, rest = nnx.split(Block(nnx.Rngs(0)), nnx.Param, ...)

    def residuals(wrap):
        def fn(params):
            block = nnx.merge(graph, params, rest, copy=True)
            return wrap(block)(wrap(block)(X))

        return residual_bytes(fn, params)

    # The second call's input, and a product a call.
    assert residuals(lambda block: checkpoint(block, preset)) == X.nbytes * (1 + 2 * per_block)
    assert residuals(lambda block: block) > X.nbytes * 3


def test_a_method_of_the_base_class_is_not_taken_for_its_override():
    """`super().method` has the name of the method that calls it."""

    class Doubled(Block):
        def features(self, x, *, train, wrap=lambda method: method):
            return 2 * wrap(super().features)(x, train=train)

    model, plain = Doubled(nnx.Rngs(0)), Doubled(nnx.Rngs(0))
    wrap = lambda method: checkpoint(method, "full")  # noqa: E731
    np.testing.assert_array_equal(model.features(X, train=True, wrap=wrap), plain.features(X, train=True))


def test_a_classmethod_is_refused():
    class Made(Block):
        @classmethod
        def make(cls):
            return cls(nnx.Rngs(0))

    with pytest.raises(InputError, match="a bound nnx method; got <bound method .*Made.make"):
        checkpoint(Made.make, "full")
