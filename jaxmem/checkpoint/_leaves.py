"""The leaves of a pytree by name, as a checkpoint holds them."""

import dataclasses
from typing import Any

import jax
import numpy as np

from jaxmem._shown import Brief
from jaxmem.workload import path_string


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf(Brief):
    """What is known of an array in a checkpoint.

    Args:
      shape: of the whole array, whatever its sharding.
      dtype: its name; of a PRNG key that of its data.
      key: the implementation of a typed PRNG key, "threefry2x32"; empty for other arrays.
    """

    shape: tuple[int, ...]
    dtype: str
    key: str = ""


def named_leaves(tree: Any) -> dict[str, Any]:
    """Name → leaf, names as `path_string` makes them: "params/dense/kernel"."""
    return {path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def described(leaf: Any) -> Leaf:
    """The `Leaf` of an array, or of a `ShapeDtypeStruct`."""
    if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        said = []

        def look(key):
            said.append(str(jax.random.key_impl(key)))  # of a shape JAX tells it only while tracing
            return jax.random.key_data(key)

        data = jax.eval_shape(look, leaf)
        return Leaf(shape=data.shape, dtype=str(data.dtype), key=said[0])
    return Leaf(shape=tuple(np.shape(leaf)), dtype=str(leaf.dtype))
