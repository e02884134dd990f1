"""The leaves of a pytree by name, as a checkpoint holds them."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmem._shown import Brief
from jaxmem.errors import CheckpointError
from jaxmem.workload import path_string

# Dtypes that tensorstore cannot write → that in which their data are written.
_WIDENED = {"uint1": "uint8", "uint2": "uint8", "uint4": "uint8", "int1": "int8"}
# NumPy's own, which neither tensorstore nor JAX has.
_UNWRITTEN = ("float96", "float128", "complex192", "complex256")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf(Brief):
    """What is known of an array in a checkpoint.

    Args:
      shape: of the whole array, whatever its sharding.
      dtype: its name; of a PRNG key that of its data.
      key: the implementation of a typed PRNG key, "threefry2x32"; empty for other arrays.
      weak: whether it is a scalar of a weak type, with which bfloat16 stays bfloat16. Leaves do not differ by it.

    >>> print(Leaf(shape=(4, 8), dtype="bfloat16"), Leaf(shape=(2,), dtype="uint32", key="threefry2x32"))
    bfloat16[4, 8] a threefry2x32 key
    """

    shape: tuple[int, ...]
    dtype: str
    key: str = ""
    weak: bool = dataclasses.field(default=False, compare=False)

    def __str__(self) -> str:
        if not self.key:
            return f"{self.dtype}{list(self.shape)}"
        return f"a {self.key} key" if len(self.shape) == 1 else f"{self.key} keys{list(self.shape[:-1])}"

    @property
    def size(self) -> int:
        """Number of elements; arrays without any are in the manifest only."""
        return math.prod(self.shape)

    @property
    def stored_dtype(self) -> str:
        """The dtype in which the data are written."""
        return _WIDENED.get(self.dtype, self.dtype)


def named_leaves(tree: Any) -> dict[str, Any]:
    """Name → leaf, in the tree's order; names as `path_string` makes them.

    None and empty containers are structure and have no name. A tree that is one array has the name "". The classes of
    containers do not matter: a field, a key and an index of the same text have the same name, and so has a key
    "a/b" with a key "b" below a key "a". What `path_string` leaves out, a last attribute `value`, stays where
    others lie beside it.

    Raises:
      CheckpointError: two leaves have one name, or one that Orbax would write to one place, or a leaf's name is the
        beginning of another's.

    >>> sorted(named_leaves({"params": {"w": 1.0}, "moments": (2.0, None, {})}))
    ['moments/0', 'params/w']
    """
    try:
        found = jax.tree_util.tree_leaves_with_path(tree)
    except ValueError as error:
        raise CheckpointError(
            wanted="a pytree, whose dicts have keys that can be ordered",
            got=str(error).rstrip("."),
            do="Use strings for keys.",
        ) from error
    below = collections.Counter(path[:end] for path, _ in found for end in range(len(path)))
    named, paths, written = {}, {}, {}
    for path, leaf in found:
        name = path_string(path)
        if path and below[path[:-1]] > 1:
            name = jax.tree_util.keystr(path, simple=True, separator="/")
        # Orbax joins the parts of a name with dots.
        other = written.setdefault(name.replace("/", "."), path)
        if other is not path:
            raise _collision(other, path)
        named[name], paths[name] = leaf, path
    for name, path in paths.items():
        for end in (i for i, letter in enumerate(name) if letter == "/"):
            if name[:end] in paths:
                raise _collision(paths[name[:end]], path)
    return named


def _collision(*paths: Any) -> CheckpointError:
    one, other = (f"tree{jax.tree_util.keystr(path)}" for path in paths)
    return CheckpointError(
        wanted="leaves whose names tell them apart in a file, where 1 and '1', and a/b and a.b, are the same",
        got=f"{one} and {other}",
        do="Rename one of them.",
    )


def described(leaf: Any, name: str = "") -> Leaf:
    """The `Leaf` of an array, a `ShapeDtypeStruct` or a number.

    A Python int counts as int32 where it fits, as in JAX, and else as int64; a float as float64.

    Args:
      leaf: of a tree.
      name: by which it is refused.

    Raises:
      CheckpointError: it is no array, but for example a string, or its dtype cannot be written.

    >>> described(np.ones((2, 3), np.float32)), described(7)
    (Leaf(shape=(2, 3), dtype='float32', key='', weak=False), Leaf(shape=(), dtype='int32', key='', weak=False))
    """
    if is_number(leaf):
        leaf = _number(leaf)
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        raise _refused(name, f"a {type(leaf).__name__}")
    try:
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    except TypeError:  # torch's, which NumPy does not know
        raise _refused(name, f"a {type(leaf).__name__} of dtype {leaf.dtype}") from None
    if is_key:
        said = []

        def look(key):
            said.append(str(jax.random.key_impl(key)))  # of a shape JAX tells it only while tracing
            return jax.random.key_data(key)

        data = jax.eval_shape(look, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return Leaf(shape=tuple(data.shape), dtype=str(data.dtype), key=said[0])
    if isinstance(leaf, np.ma.MaskedArray):
        raise _refused(name, "a masked array, whose mask would be lost")
    known = jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == bool
    if not known or np.dtype(leaf.dtype).name in _UNWRITTEN:
        raise _refused(name, f"an array of dtype {leaf.dtype}")
    weak = leaf.shape == () and bool(getattr(leaf, "weak_type", False))
    return Leaf(shape=tuple(leaf.shape), dtype=str(np.dtype(leaf.dtype)), weak=weak)


def storable(leaf: Any, name: str = "") -> Any:
    """What Orbax is given for a leaf: an array, a typed key's data, an array for a number.

    Args:
      leaf: of a tree.
      name: by which it is refused.

    Raises:
      CheckpointError: there is nothing to write: it is no array, a shape without values, an array that a step was
        given and deleted, or traced.
    """
    known = described(leaf, name)
    if isinstance(leaf, Tracer):
        raise _refused(name, "a traced value: a checkpoint is saved outside of jit")
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise _refused(name, "an array that was donated to a step, and so is deleted")
        data = jax.random.key_data(leaf) if known.key else leaf
        return data if known.stored_dtype == known.dtype else data.astype(known.stored_dtype)
    if is_number(leaf):
        return _number(leaf)
    if isinstance(leaf, (np.ndarray, np.generic)):
        return np.asarray(leaf).astype(known.stored_dtype, copy=False)
    raise _refused(name, f"a {type(leaf).__name__}, which has no values")


def is_number(leaf: Any) -> bool:
    """Whether it is a number of Python, which NumPy's float64 also claims to be."""
    return isinstance(leaf, (bool, int, float, complex)) and not isinstance(leaf, np.generic)


def _number(number: Any) -> np.ndarray:
    if isinstance(number, bool) or not isinstance(number, int):
        return np.asarray(number)
    return np.asarray(number, np.int32 if -(2**31) <= number < 2**31 else None)


def _refused(name: str, got: str) -> CheckpointError:
    return CheckpointError(
        wanted="a tree of arrays and numbers to save or restore",
        got=f"{got}, at {name!r}",
        do="Keep what is no array out of the tree; `record` takes JSON.",
    )


def to_nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested dict of strings that Orbax writes, from name → value.

    "/" is no letter of a key there: a key "a/b" becomes a key "b" below a key "a". Leaves are found again by their
    names, so both come back where they were.

    >>> to_nested({"params/w": 1, "step": 2})
    {'params': {'w': 1}, 'step': 2}
    """
    nested = {}
    for name, value in leaves.items():
        *parents, last = name.split("/")
        at = nested
        for parent in parents:
            at = at.setdefault(parent, {})
        at[last] = value
    return nested


def from_nested(nested: Mapping[str, Any], root: str = "") -> dict[str, Any]:
    """The inverse of `to_nested`.

    >>> from_nested({"params": {"w": 1}, "step": 2})
    {'params/w': 1, 'step': 2}
    """
    leaves = {}
    for key, value in nested.items():
        name = root + key
        leaves |= from_nested(value, name + "/") if isinstance(value, dict) else {name: value}
    return leaves
