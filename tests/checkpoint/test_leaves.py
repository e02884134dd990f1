"""Names of leaves, what is known of each, and what Orbax is given for it."""

import string
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import freeze
from hypothesis import given
from hypothesis import strategies as st

from jaxmem.checkpoint._leaves import Leaf, described, from_nested, named_leaves, storable, to_nested
from jaxmem.errors import CheckpointError


class Search(NamedTuple):
    value: Any
    rate: Any


class Turned(NamedTuple):
    rate: Any
    value: Any


def test_names_are_those_of_path_string():
    variable = nnx.Param(jnp.ones(2))
    assert list(named_leaves({"layers": [variable], "tuple": (1.0, None, {}, 2.0)})) == [
        "layers/0",
        "tuple/0",
        "tuple/3",
    ]
    assert list(named_leaves(jnp.ones(2))) == [""]
    assert named_leaves({"a": None}) == named_leaves(()) == {}


def test_value_is_a_name_where_others_lie_beside_it():
    assert list(named_leaves({"search": Search(1.0, 2.0)})) == ["search/value", "search/rate"]
    lbfgs = named_leaves(optax.lbfgs().init({"w": jnp.ones(2)}))
    assert any(name.endswith("/value") for name in lbfgs)


def test_classes_and_orders_do_not_matter():
    dense = {"dense": {"kernel": 1.0, "bias": 2.0}}
    assert named_leaves(dense) == named_leaves(freeze(dense))
    assert named_leaves(Search(1.0, 2.0)) == named_leaves(Turned(2.0, 1.0)) == named_leaves({"rate": 2.0, "value": 1.0})
    assert named_leaves([1.0, 2.0]) == named_leaves({"0": 1.0, "1": 2.0}) == named_leaves({0: 1.0, 1: 2.0})


def test_a_name_that_begins_another_is_refused():
    with pytest.raises(CheckpointError, match=r"tree\['a'\] and tree\['a/b/c'\]"):
        named_leaves({"a": 1.0, "a/b/c": 2.0})
    assert len(named_leaves({"a": 1.0, "ab": 2.0, "a c": 3.0})) == 3


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_key_is_known_by_its_implementation(impl):
    keys = jax.random.split(jax.random.key(0, impl=impl), 3)
    data = jax.random.key_data(keys)
    wanted = Leaf(shape=data.shape, dtype="uint32", key=impl)
    assert described(keys) == described(jax.ShapeDtypeStruct(keys.shape, keys.dtype)) == wanted
    assert np.array_equal(storable(keys), data)


def test_numbers():
    leaves = [True, 3, -(2**31), 2**31, 0.1, 1j, np.float32(1), np.int64(2), np.bool_(True)]
    dtypes = ["bool", "int32", "int32", "int64", "float64", "complex128", "float32", "int64", "bool"]
    assert [described(leaf).dtype for leaf in leaves] == dtypes
    assert [str(storable(leaf).dtype) for leaf in leaves] == dtypes
    assert [storable(leaf).item() for leaf in leaves] == leaves


def test_what_is_traced_or_no_array_is_refused():
    with pytest.raises(CheckpointError, match="outside of jit.*'step'"):
        jax.jit(lambda x: storable(x, "step"))(1.0)
    masked = np.ma.array([1.0, 2.0], mask=[False, True])
    for leaf, got in (("text", "a str"), (len, "a builtin"), (np.array([None]), "dtype object"), (masked, "a masked")):
        with pytest.raises(CheckpointError, match=got):
            described(leaf, "at")


NAMES = st.lists(st.text(string.ascii_letters + ".% ", min_size=1, max_size=3), min_size=1, max_size=3).map("/".join)


@given(st.dictionaries(NAMES, st.integers()))
def test_nested_dicts_hold_every_name(leaves):
    try:
        named = named_leaves(leaves)
    except CheckpointError:
        return
    assert from_nested(to_nested(named)) == leaves
