"""Trees of flax, nnx and optax, and what else a tree can hold, come back as they were."""

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict, freeze
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import accumulate, checkpoint
from jaxmem.errors import CheckpointError

OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.1, 0.0, 10)),
    optax.ema(0.9),
)


def bits(leaf: Any) -> tuple:
    """Everything by which a leaf can differ from another."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return (
            str(jax.random.key_impl(leaf)),
            leaf.sharding,
            leaf.committed,
            np.asarray(jax.random.key_data(leaf)).tobytes(),
        )
    value = np.asarray(leaf)
    place = [getattr(leaf, name, None) for name in ("sharding", "committed", "weak_type")]
    return type(leaf), value.dtype, value.shape, place, value.tobytes()


def assert_same(got: Any, expected: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        assert bits(one) == bits(other), jax.tree_util.keystr(path)


def round_trip(tmp_path, tree: Any, like: Any = None) -> Any:
    checkpoint.save(tmp_path, tree, number=0)
    return checkpoint.restore(tmp_path, tree if like is None else like)


def abstract(tree: Any) -> Any:
    """The shapes, with their shardings where arrays are committed to them."""

    def shape(x):
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding if x.committed else None)

    return jax.tree.map(shape, tree)


def params():
    return {
        "dense": {"kernel": jax.random.normal(jax.random.key(0), (4, 8)), "bias": jnp.zeros(8)},
        "out": {3: jnp.ones(2)},
    }


def stepped(optimizer, params):
    """The optimizer's state after a step, so that its moments are not zeros."""
    grads = jax.tree.map(jnp.ones_like, params)
    return jax.jit(optimizer.update)(grads, optimizer.init(params), params)[1]


class Pair(NamedTuple):
    value: Any
    other: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    value: Any
    nothing: Any
    static: str = dataclasses.field(metadata={"static": True})


class Foreign:
    """As a tensor of another package, whose dtype NumPy does not know."""

    shape, dtype = (2,), type("dtype", (), {"__str__": lambda self: "torch.float32"})()


def labels(params):
    return {"dense": {"kernel": "adam", "bias": "frozen"}, "out": "sgd"}


OPTIMIZERS = {
    "chain": lambda: OPTIMIZER,
    "masked": lambda: optax.masked(optax.adam(0.1), {"dense": {"kernel": True, "bias": False}, "out": True}),
    "multi_transform": lambda: optax.multi_transform(
        {"adam": optax.adam(0.1), "sgd": optax.sgd(0.1, momentum=0.9), "frozen": optax.set_to_zero()}, labels
    ),
    "factored": lambda: optax.adafactor(0.1, min_dim_size_to_factor=4),
    "multi_steps": lambda: accumulate.multi_steps(OPTIMIZER, 4, trainable="kernel"),
    "MultiSteps": lambda: optax.MultiSteps(OPTIMIZER, 4).gradient_transformation(),
    "not_finite": lambda: optax.apply_if_finite(optax.adam(0.1), 3),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_states_of_optax(tmp_path, name):
    state = stepped(OPTIMIZERS[name](), params())
    tree = {"params": params(), "opt_state": state}
    assert_same(round_trip(tmp_path, tree, abstract(tree)), tree)


def test_states_of_linen(tmp_path):
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4, kernel_init=nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model")))(x)
            return nn.BatchNorm(use_running_average=False)(x)

    variables = Model().init(jax.random.key(0), jnp.ones((2, 3)))
    state = TrainState.create(apply_fn=Model().apply, params=freeze(variables["params"]), tx=OPTIMIZER)
    assert isinstance(state.params, FrozenDict)
    grads = jax.tree.map(jnp.ones_like, state.params)
    after = jax.jit(lambda state: state.apply_gradients(grads=grads))(state)
    tree = {"state": after, "batch_stats": variables["batch_stats"]}
    assert_same(round_trip(tmp_path, tree), tree)
    # A fresh TrainState counts in a Python int, and takes the array of one that was jitted.
    fresh = checkpoint.restore(tmp_path, {**tree, "state": state})
    assert type(fresh["state"].step) is int and fresh["state"].step == 1
    assert_same(fresh["state"].opt_state, after.opt_state)
    # Classes do not matter, names do: frozen or not, boxed by nn.with_partitioning or not.
    plain = nn.unbox(after.replace(params=after.params.unfreeze()))
    assert_same(checkpoint.restore(tmp_path, {**tree, "state": plain})["state"].params, plain.params)


def test_states_of_nnx(tmp_path):
    def make(seed):
        rngs = nnx.Rngs(seed)
        model = nnx.Sequential(nnx.Linear(3, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs), nnx.Dropout(0.5, rngs=rngs))
        return model, nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def loss(model):
        return model(jnp.arange(6.0).reshape(2, 3)).sum()

    @nnx.jit
    def train(model, optimizer):
        grads = nnx.grad(loss)(model)
        optimizer.update(model, grads)

    model, optimizer = make(0)
    train(model, optimizer)
    tree = jax.tree.map(jnp.copy, {"model": nnx.state(model), "optimizer": nnx.state(optimizer)})
    other, other_optimizer = make(1)
    got = round_trip(tmp_path, tree, {"model": nnx.state(other), "optimizer": nnx.state(other_optimizer)})
    assert_same(got, tree)
    nnx.update(other, got["model"])
    nnx.update(other_optimizer, got["optimizer"])
    train(model, optimizer)
    train(other, other_optimizer)  # with the same dropout
    assert_same(nnx.state(other), nnx.state(model))
    # From shapes, and as plain dicts.
    shapes = nnx.state(nnx.eval_shape(lambda: make(0)[0]))
    assert_same(checkpoint.restore(tmp_path, {**got, "model": shapes})["model"], got["model"])
    pure = checkpoint.restore(tmp_path, {**got, "model": nnx.to_pure_dict(got["model"])})
    assert_same(jax.tree.leaves(pure), jax.tree.leaves(tree))


DTYPES = ("float8_e4m3fn", "int4", "uint4", "bool", "complex64", "bfloat16")


def test_what_else_a_tree_can_hold(tmp_path):
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    values = jnp.arange(32).reshape(8, 4) % 7
    arrays = {name: jax.device_put(values.astype(name), NamedSharding(mesh, P("data", "model"))) for name in DTYPES}
    keys = jax.random.split(jax.random.key(5), 8)
    tree = {
        **arrays,
        "not committed": {name: values.astype(name) for name in DTYPES},
        "weak": (jnp.asarray(0.1), jnp.asarray(3), jax.device_put(jnp.asarray(2.0), NamedSharding(mesh, P()))),
        "keys": jax.device_put(keys, NamedSharding(mesh, P("data"))),
        "rbg": jax.random.key(1, impl="rbg"),
        "nan": jnp.array([jnp.nan, -jnp.nan, jnp.inf, -0.0, 1e-45]),
        "none": None,
        "empty": ({}, [], optax.EmptyState(), optax.MaskedNode()),
        "size 0": jax.device_put(jnp.zeros((0, 8), jnp.bfloat16), NamedSharding(mesh, P(None, "data"))),
        "pair": Pair(value=jnp.ones(2), other=jnp.zeros(3)),
        "record": Record(value=jnp.ones(2), nothing=None, static="kept"),
        "numpy": np.arange(3),  # int64, which JAX would not hold
        "numpy scalar": np.float64(0.1),
        "python": (7, 2**40, 0.1, True, 1 + 2j),
        "on/host": jax.device_put(jnp.ones(8), NamedSharding(mesh, P("data"), memory_kind="pinned_host")),
        "a.b": {"": jnp.ones(1), "ü %": jnp.ones(2)},
    }
    assert_same(round_trip(tmp_path, tree), tree)
    for at in ("int4", "uint4", "keys"):
        assert_same(round_trip(tmp_path / at, tree[at], abstract(tree[at])), tree[at])  # one array is a tree too


def test_orbax_alone_can_read_it(tmp_path):
    checkpoint.save(tmp_path, {"params": {"w": np.ones(2)}, "opt_state": (np.zeros(3), {}), "step": 3}, number=7)
    with orbax.checkpoint.PyTreeCheckpointer() as checkpointer:
        got = checkpointer.restore(tmp_path / "7" / "state")
    expected = {"params": {"w": np.ones(2)}, "opt_state": {"0": np.zeros(3)}, "step": np.asarray(3, np.int32)}
    assert_same(jax.tree.map(np.asarray, got), expected)


def test_an_empty_tree(tmp_path):
    for number, tree in enumerate([{}, None, (), {"a": jnp.zeros((0, 3))}]):
        assert_same(round_trip(tmp_path / str(number), tree, like=tree), tree)


def test_case_24_leaves_that_a_copy_could_lose(tmp_path):
    """jmp#44: a loss scale lost a field on its way through a pytree."""
    from jaxmem.precision import start_loss_scale

    scale = start_loss_scale(2.0**10)
    scale = dataclasses.replace(scale, good_windows=jnp.int32(7), skipped_in_a_row=jnp.int32(2))
    for again in (jax.tree.map(lambda x: x, scale), jax.jit(lambda x: x)(scale), round_trip(tmp_path, scale)):
        assert_same(again, scale)


@pytest.mark.parametrize(
    ("tree", "named"),
    [
        (OrderedDict({1: 1.0, "1": 2.0}), ["tree[1]", "tree['1']"]),
        ({1: 1.0, "a": 2.0}, ["ordered"]),
        ({"a/b": 1.0, "a": {"b": 2.0}}, ["tree['a/b']", "tree['a']['b']"]),
        ({"a.b": 1.0, "a": {"b": 2.0}}, ["tree['a.b']", "tree['a']['b']"]),  # Orbax would write one over the other
        ({"a": 1.0, "a/b": 2.0}, ["tree['a']", "tree['a/b']"]),
        ({"name": "gpt"}, ["a str", "'name'"]),
        ({"a": np.array(["x"])}, ["<U1", "'a'"]),
        ({"a": np.zeros(2, np.longdouble)}, [np.dtype(np.longdouble).name, "'a'"]),
        ({"a": np.ma.array([1.0, 2.0], mask=[0, 1])}, ["a masked array", "'a'"]),
        ({"a": Foreign()}, ["a Foreign of dtype torch.float32", "'a'"]),
        ({"a": jax.ShapeDtypeStruct((2,), np.float32)}, ["ShapeDtypeStruct", "'a'"]),
    ],
)
def test_what_cannot_be_saved_is_named(tmp_path, tree, named):
    with pytest.raises(CheckpointError) as error:
        checkpoint.save(tmp_path / "runs", tree, number=0)
    assert all(name in str(error.value) for name in named)
    assert not (tmp_path / "runs" / "0").exists()


def test_a_donated_state_is_named(tmp_path):
    tree = {"w": jnp.ones(3)}
    jax.jit(lambda tree: tree, donate_argnums=0)(tree)["w"].block_until_ready()
    with pytest.raises(CheckpointError, match="donated.*'w'"):
        checkpoint.save(tmp_path, tree, number=0)


def test_a_guard_against_transfers_does_not_hinder_a_restore(tmp_path):
    tree = {"w": jnp.arange(3.0), "none": jnp.zeros((3, 0)), "key": jax.random.key(1), "weak": jnp.asarray(1.5)}
    checkpoint.save(tmp_path, tree, number=0)
    with jax.transfer_guard("disallow"):
        restored = checkpoint.restore(tmp_path, tree)
    assert restored["w"].tolist() == [0, 1, 2] and restored["none"].shape == (3, 0)


def test_a_part_of_a_checkpoint(tmp_path):
    tree = TrainState.create(apply_fn=None, params=params(), tx=accumulate.multi_steps(OPTIMIZER, 4))
    batch = jax.tree.map(jnp.ones_like, tree.params)
    tree = jax.jit(tree.apply_gradients)(grads=batch)  # in mid-window, which is no concern of parameters
    checkpoint.save(tmp_path, tree)
    assert_same(checkpoint.restore(tmp_path, tree.params, only="params"), tree.params)
    assert_same(checkpoint.restore(tmp_path, abstract(tree.params["dense"]), only="params/dense"), tree.params["dense"])
    assert_same(checkpoint.restore(tmp_path, tree.params["out"][3], only="params/out/3"), tree.params["out"][3])
    assert_same(checkpoint.restore(tmp_path, tree.opt_state, only="opt_state"), tree.opt_state)
    with pytest.raises(CheckpointError, match="got 'par'. Names begin with step, params, opt_state."):
        checkpoint.restore(tmp_path, tree.params, only="par")
    with pytest.raises(CheckpointError, match="it lacks: params/more"):
        checkpoint.restore(tmp_path, tree.params | {"more": 1.0}, only="params")


@pytest.mark.parametrize("part", [lambda params: params, lambda params: {"params": params}])
def test_who_wants_a_part_is_told_how(tmp_path, part):
    checkpoint.save(tmp_path, TrainState.create(apply_fn=None, params=params(), tx=optax.adam(0.1)))
    with pytest.raises(CheckpointError, match="only='params'"):
        checkpoint.restore(tmp_path, part(params()))


def test_a_checkpoint_says_where_it_is(tmp_path):
    checkpoint.save(tmp_path, params(), number=3)
    assert f"path={tmp_path / '3'}" in repr(checkpoint.latest(tmp_path))
