"""Workload: what it accepts, what it refuses by name, and the small helpers that its consumers share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxmem import Workload
from jaxmem._signatures import call_loss, declares
from jaxmem._trainable import select_paths
from jaxmem.errors import WorkloadError
from jaxmem.workload import path_string

SGD = optax.sgd(0.1)
BATCH = {"x": jnp.ones(4)}


def loss(params, batch):
    return (params["w"] * batch["x"]).mean()


@pytest.mark.parametrize(
    "arguments, fields, message",
    [
        ((None, {}, BATCH, SGD), {}, "loss_fn to be a function .* got NoneType"),
        (({"w": 1.0}, loss, BATCH, SGD), {}, "got dict"),
        ((loss, {}, BATCH, None), {}, "optax.GradientTransformation; got NoneType"),
        ((loss, {}, BATCH, optax.sgd), {}, "got function"),
        ((loss, {"w": "a"}, BATCH, SGD), {}, "a str at params/w"),
        ((loss, {"w": 1.0}, {"x": [1.0, "a"]}, SGD), {}, "a str at batch/x/1"),
        ((loss, {"w": 1.0}, loss, SGD), {}, "a function at batch"),
        ((loss, {"w": 1.0}, BATCH, SGD), {"state": {"n": object()}}, "an? object at state/n"),
        ((loss, {"w": 1.0}, BATCH, SGD), {"ema": 0.9}, "ema=None.* got float. Leave ema out"),
        ((loss, {"w": 1.0}, BATCH, SGD), {"eval_fn": loss}, "eval_fn=None.* got function"),
        ((loss, {"w": 1.0}, BATCH, SGD), {"choices": {"a": 1}}, "choices=None.* got dict"),
        ((loss, {"w": 1.0}, BATCH, SGD), {"param_shardings": 1}, "param_shardings=None.* got int"),
        ((loss, {"w": 1.0}, BATCH, SGD), {"rng": 0}, "one PRNG key; got a int"),
        ((loss, {"w": 1.0}, BATCH, SGD), {"rng": jax.random.split(jax.random.key(0))}, r"got key<fry>\[2\]"),
    ],
)
def test_arguments_of_the_wrong_kind(arguments, fields, message):
    with pytest.raises(WorkloadError, match=message):
        Workload(*arguments, **fields)


def test_shapes_functions_of_a_key_and_numbers_are_fine():
    shape = jax.ShapeDtypeStruct((4,), jnp.float32)
    for params in ({"w": shape}, {"w": 1.0, "none": None}, lambda key: {"w": jax.random.normal(key)}):
        Workload(loss, params, {"x": shape, "key": jax.random.key(0)}, SGD, state=lambda key: {}, data=iter(()))


def test_every_kind_of_key_is_fine():
    for key in (jax.random.key(0), jax.random.PRNGKey(0), jax.random.key(0, impl="rbg"), np.zeros(2, np.uint32)):
        Workload(loss, {"w": 1.0}, BATCH, SGD, rng=key)


def test_params_and_batch_may_have_any_name():
    def named(state, rng, *, memory):
        return state, rng, memory

    assert not declares(named, "state") and not declares(named, "rng") and declares(named, "memory")
    assert call_loss(named, 1, 2, state=3, rng=4, memory=5) == (1, 2, 5)
    assert call_loss(lambda state, batch, rng, **more: (state, batch, rng, more), 1, 2, rng=4, memory=5) == (
        1,
        2,
        4,
        {"memory": 5},
    )


def test_workloads_are_compared_by_identity_and_are_frozen():
    one, other = (Workload(loss, {"w": 1.0}, BATCH, SGD) for _ in range(2))
    assert one != other and len({one, other}) == 2
    with pytest.raises(AttributeError):
        one.batch = None
    with pytest.raises(TypeError):
        Workload(loss, {"w": 1.0}, BATCH, SGD, jax.random.key(0))  # everything else goes by name


def test_a_loss_gets_only_the_keywords_that_it_declares():
    def keyword_only(params, batch, *, rng):
        return rng

    def positional(params, batch, state=None):
        return state

    def all_of_them(params, batch, **keywords):
        return sorted(keywords)

    class Callable:
        def __call__(self, params, batch, memory):
            return memory

    keywords = {"rng": 1, "state": 2, "memory": 3}
    assert call_loss(lambda p, b: (p, b), 8, 9, **keywords) == (8, 9)
    assert call_loss(keyword_only, 0, 0, **keywords) == 1
    assert call_loss(positional, 0, 0, **keywords) == 2
    assert call_loss(all_of_them, 0, 0, **keywords) == ["memory", "rng", "state"]
    assert call_loss(Callable(), 0, 0, **keywords) == 3
    assert call_loss(functools.partial(keyword_only), 0, 0, **keywords) == 1
    assert call_loss(functools.wraps(keyword_only)(lambda *a, **k: keyword_only(*a, **k)), 0, 0, **keywords) == 1
    assert declares(jax.jit(keyword_only), "rng") and not declares(jax.jit(keyword_only), "state")
    assert not declares(lambda params, batch, rng, /: 0, "rng")


TREE = {"encoder": {"kernel": 1.0, "bias": 2.0}, "decoder": [{"kernel": 3.0}, {"kernel": 4.0, "none": None}]}


@pytest.mark.parametrize(
    "selection, picked",
    [
        (None, [1, 2, 3, 4]),
        ("kernel$", [1, 3, 4]),
        ("decoder/1", [4]),
        ("^encoder/(kernel|bias)$", [1, 2]),
        ("nothing", []),
        (lambda path, leaf: path.startswith("decoder") and leaf > 3, [4]),
        (lambda path, leaf: np.bool_(leaf < 2), [1]),
        ({"encoder": False, "decoder": [True, {"kernel": False, "none": None}]}, [3]),
        (True, [1, 2, 3, 4]),
    ],
)
def test_selections(selection, picked):
    chosen = select_paths(TREE, selection)
    assert jax.tree.structure(chosen) == jax.tree.structure(TREE)
    leaves = zip(jax.tree.leaves(TREE), jax.tree.leaves(chosen), strict=True)
    assert sorted(leaf for leaf, yes in leaves if yes) == picked


@pytest.mark.parametrize(
    "selection, message",
    [
        ("(", r"regular expression; got '\('"),
        ({"encoder": True}, "pytree prefix of the parameters"),
        ({"encoder": True, "decoder": "yes"}, "'yes' at trainable/decoder/0/kernel"),
        (3, "pytree prefix of bools; got 3"),
    ],
)
def test_selections_that_select_nothing_sensible(selection, message):
    with pytest.raises(WorkloadError, match=message):
        select_paths(TREE, selection)


def test_path_strings():
    paths = [path_string(path, root="params") for path, _ in jax.tree_util.tree_leaves_with_path(TREE)]
    assert paths == [
        "params/decoder/0/kernel",
        "params/decoder/1/kernel",
        "params/encoder/bias",
        "params/encoder/kernel",
    ]
    assert path_string((), root="batch") == "batch" and path_string(()) == ""


def test_linen_and_nnx_models_have_the_same_paths():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    variables = nn.Dense(1).init(jax.random.key(0), jnp.ones((1, 2)))["params"]
    for tree in (nnx.state(model), variables):
        assert [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)] == ["bias", "kernel"]
    assert [bool(leaf) for leaf in jax.tree.leaves(select_paths(nnx.state(model), "^kernel$"))] == [False, True]
