"""`remat.apply`: the layers of a whole loss, module or method are found, and keep what the policy says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxmem import Policy, remat
from jaxmem.errors import InputError, RematWithoutEffect, UnknownPolicyError, UnmatchedNamesError

X = jnp.asarray(np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32))
Y = jnp.arange(8) % 3
KEY = jax.random.key(3)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        y = nn.Dropout(0.3, deterministic=not train)(nn.gelu(nn.Dense(32)(nn.LayerNorm()(x))))
        return x + nn.BatchNorm(use_running_average=not train)(nn.Dense(16)(y))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        for _ in range(3):
            x = Block()(x, train)
        return nn.Dense(3)(x)


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 16, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.norm(self.down(self.dropout(nnx.gelu(self.up(x)))))


class NnxNet(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(3)])

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


VARIABLES = jax.jit(functools.partial(Net().init, train=False))(KEY, X)
STATS = {"batch_stats": VARIABLES["batch_stats"]}


def loss_of(apply_fn):
    def loss(params, x, train=True):
        rngs = {"dropout": KEY}
        logits, new = apply_fn({"params": params, **STATS}, x, train=train, rngs=rngs, mutable=["batch_stats"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, Y[: len(x)]).mean(), (logits, new)

    return loss


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@functools.lru_cache
def plain():
    return jax.jit(jax.value_and_grad(loss_of(Net().apply), has_aux=True))(VARIABLES["params"], X)


TARGETS = {
    "loss": lambda policy: remat.apply(loss_of(Net().apply), policy),
    "apply": lambda policy: loss_of(remat.apply(Net().apply, policy)),
    "module": lambda policy: loss_of(remat.apply(Net(), policy).apply),
    "class": lambda policy: loss_of(remat.apply(Net, policy)().apply),
}


@pytest.mark.parametrize("target, policy", [*((t, "full") for t in TARGETS), ("loss", "dots"), ("class", "auto:0.25")])
def test_results_gradients_and_statistics_are_the_plain_ones_and_less_is_kept(target, policy):
    loss = TARGETS[target](policy)
    assert_same(jax.jit(jax.value_and_grad(loss, has_aux=True))(VARIABLES["params"], X), plain())
    kept, all_of_it = (
        remat.residual_bytes(lambda params, fn=fn: fn(params, X)[0], VARIABLES["params"])
        for fn in (loss, loss_of(Net().apply))
    )
    assert kept < 0.3 * all_of_it


def test_a_wrapped_module_has_the_parameters_of_the_plain_one():
    assert_same(jax.jit(functools.partial(remat.apply(Net(), "full").init, train=False))(KEY, X), VARIABLES)


@pytest.mark.parametrize("where", ["loss", "module", "method"])
def test_an_nnx_module_is_updated_once(where):
    def loss(model, x, around=lambda model: model):
        out = around(model)(x)
        return (out**2).mean(), out

    changed = {
        "loss": remat.apply(loss, "full"),
        "module": functools.partial(loss, around=lambda model: remat.apply(model, "full")),
        "method": functools.partial(loss, around=lambda model: remat.apply(model.__call__, "full")),
    }[where]
    found = []
    for fn in (loss, changed):
        model = NnxNet()
        out = nnx.jit(nnx.value_and_grad(fn, has_aux=True))(model, X)
        found.append((out, [leaf for leaf in jax.tree.leaves(nnx.state(model)) if not hasattr(leaf, "_base_array")]))
    assert_same(found[1], found[0])


def deep(weights, x):
    for w in weights:
        x = jnp.tanh(jnp.tanh(x) @ w)
    return (x**2).mean()


WEIGHTS = [jnp.eye(16) * 0.5] * 3


def test_it_works_under_vmap_and_in_shard_map():
    full = remat.apply(deep, "full")
    want = jax.vmap(jax.grad(deep), (None, 0))(WEIGHTS, X[:, None])
    assert_same(jax.vmap(jax.grad(full), (None, 0))(WEIGHTS, X[:, None]), want)
    mesh = jax.sharding.Mesh(jax.devices()[:1], "data")
    spec = jax.sharding.PartitionSpec
    local = jax.shard_map(jax.grad(full), mesh=mesh, in_specs=(spec(), spec("data")), out_specs=spec())
    assert_same(jax.jit(local)(WEIGHTS, X), jax.grad(deep)(WEIGHTS, X))


def test_a_policy_that_changes_nothing_is_refused_where_it_is_differentiated():
    linear = remat.apply(lambda weights, x: sum(functools.reduce(lambda x, w: x @ w, weights, x)).sum(), "dots")
    linear(WEIGHTS[:1] * 4, X)
    with pytest.raises(RematWithoutEffect, match="of residuals with and without it"):
        jax.grad(linear)(WEIGHTS[:1] * 4, X)
    with pytest.raises(RematWithoutEffect, match="remat.checkpoint"):
        remat.apply(lambda w, x: jnp.sum(x @ w), "full")(X.T, X)
    assert remat.apply(deep, "none") is deep
    with pytest.raises(UnmatchedNamesError, match="hidden"):
        jax.grad(remat.apply(deep, Policy(save=("hidden",))))(WEIGHTS, X)


@pytest.mark.parametrize(
    "args, error, text",
    [
        (("dots", deep), InputError, "Give the loss or the module first"),
        ((deep, "dotz"), UnknownPolicyError, "dotz"),
        ((3, "dots"), InputError, "got 3"),
    ],
)
def test_wrong_uses(args, error, text):
    with pytest.raises(error, match=text):
        remat.apply(*args)
