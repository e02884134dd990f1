"""An nnx module as the first argument: gradients of `nnx.value_and_grad`, and state that is updated once."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxmem.accumulate import value_and_grad
from jaxmem.errors import InputError
from tests.accumulate.problems import assert_trees_close

X = jnp.asarray(np.random.default_rng(0).normal(size=(12, 4)).astype(np.float32))


class Net(nnx.Module):
    def __init__(self, *, norm=False, rate=0.0, seed=0):
        rngs = nnx.Rngs(seed)
        self.first, self.second = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 2, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs, momentum=0.5) if norm else None
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        x = self.first(x)
        x = x if self.norm is None else self.norm(x)
        return self.second(self.dropout(nnx.gelu(x)))


def loss(model, x):
    out = model(x)
    return (out**2).mean(), out


def state_of(model):
    leaves = jax.tree_util.tree_leaves_with_path(nnx.state(model))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves if "key" not in jax.tree_util.keystr(path)}


@pytest.mark.parametrize("k, options", [(1, {"norm": True, "rate": 0.5}), (3, {}), (12, {})])
def test_it_is_nnx_value_and_grad(k, options):
    ours, theirs = Net(**options), Net(**options)
    (want, out), grads = nnx.value_and_grad(loss, has_aux=True)(theirs, X)
    (value, got), own = nnx.jit(value_and_grad(loss, k, has_aux=True))(ours, X)
    assert_trees_close((value, got, own), (want, out, grads))
    assert_trees_close(state_of(ours), state_of(theirs))
    nnx.Optimizer(ours, optax.sgd(0.1), wrt=nnx.Param).update(ours, own)


def test_batch_norm_and_dropout_go_from_micro_batch_to_micro_batch():
    ours, theirs = Net(norm=True, rate=0.5), Net(norm=True, rate=0.5)
    (value, out), grads = value_and_grad(loss, 3, has_aux=True)(ours, X)
    parts = [nnx.value_and_grad(loss, has_aux=True)(theirs, X[i::3]) for i in range(3)]
    assert_trees_close(state_of(ours), state_of(theirs))
    assert_trees_close((value, grads), jax.tree.map(lambda *xs: sum(xs) / 3, *[(v, g) for (v, _), g in parts]))
    np.testing.assert_allclose(out[1::3], parts[1][0][1], rtol=1e-5)


def test_random_numbers_given_as_an_argument_are_counted():
    def noisy(model, x, rngs):
        return loss(model, x + jax.random.normal(rngs.noise(), x.shape))

    rngs = nnx.Rngs(noise=1)
    value_and_grad(noisy, 3, has_aux=True)(Net(), X, rngs)
    assert int(rngs.noise.count[...]) == 3


def test_only_what_wrt_names_is_differentiated():
    class Lora(nnx.Param):
        pass

    model = Net()
    model.adapter = Lora(jnp.ones(2))
    _, grads = value_and_grad(lambda m, x: (m(x) * m.adapter).mean(), 3, wrt=Lora)(model, X)
    assert [leaf.shape for leaf in jax.tree.leaves(grads)] == [(2,)]


def test_what_is_no_module_is_told():
    model = Net()
    with pytest.raises(InputError, match=r"value_and_grad\(loss, 3\)\(model, batch\)"):
        value_and_grad(loss, 3, has_aux=True)(nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param), X)
    with pytest.raises(InputError, match="Leave state out"):
        value_and_grad(loss, 3, has_aux=True)(model, X, state={})
    with pytest.raises(InputError, match="linen module Dense"):
        value_and_grad(loss, 3, has_aux=True)(nn.Dense(2), X)
