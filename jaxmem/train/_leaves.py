"""How far two trees are apart, leaf by leaf."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem._shown import Brief
from jaxmem.workload import path_string

# A leaf whose true gradient is zero (a bias before a normalisation) holds nothing but rounding: leaves are measured
# against at least this share of the root mean square of the whole tree.
_FLOOR = 1e-2


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeafDifference(Brief):
    """One leaf of two trees.

    Args:
      path: of the leaf.
      shape: of the leaf.
      dtype: of the leaf that was got.
      relative_error: L2 distance over the expected leaf's L2 norm; infinite for a NaN, and for integers that differ.
      index: of the element that is furthest off.
      got: that element.
      expected: what it should be.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    relative_error: float
    index: tuple[int, ...]
    got: float | complex
    expected: float | complex


def leaf_differences(got: Any, expected: Any) -> tuple[LeafDifference, ...]:
    """Every leaf of two trees of one structure, the worst first. Integers must be equal.

    >>> leaf_differences({"a": np.ones(2), "b": np.zeros(1)}, {"a": np.ones(2), "b": np.ones(1)})[0].path
    'b'
    """
    pairs = [
        (path_string(path), np.asarray(one), np.asarray(other))
        for (path, one), other in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    ]
    inexact = [_wide(other) for _, _, other in pairs if _is_inexact(other)]
    count = sum(leaf.size for leaf in inexact)
    spread = np.sqrt(sum(float(np.linalg.norm(leaf)) ** 2 for leaf in inexact) / count) if count else 0.0
    found = [_difference(path, one, other, _FLOOR * spread) for path, one, other in pairs]
    return tuple(sorted(found, key=lambda leaf: -leaf.relative_error))


def worst_leaf(got: Any, expected: Any) -> tuple[float, str]:
    """The largest relative error of a leaf, and its path."""
    found = leaf_differences(got, expected)
    return (found[0].relative_error, found[0].path) if found else (0.0, "")


def table(differences: Sequence[LeafDifference], limit: int = 8) -> str:
    """The worst leaves, one a line."""
    rows = [
        f"  {leaf.relative_error:9.1e}  {leaf.path} {leaf.dtype}{list(leaf.shape)}: "
        f"{leaf.got:.6g} at {list(leaf.index)}, expected {leaf.expected:.6g}"
        for leaf in differences[:limit]
    ]
    more = len(differences) - limit
    return "\n".join(rows + ([f"  and {more} more leaves, which are nearer"] if more > 0 else []))


def _difference(path: str, got: np.ndarray, expected: np.ndarray, floor: float) -> LeafDifference:
    one, other = _wide(got), _wide(expected)
    distance = np.abs(one - other)
    if _is_inexact(expected):
        scale = max(float(np.linalg.norm(other)), floor * np.sqrt(other.size), 1e-30)
        error = float(np.linalg.norm(distance)) / scale
    else:
        error = 0.0 if np.array_equal(got, expected) else float("inf")
    far = np.where(np.isnan(distance), np.inf, distance)
    index = np.unravel_index(int(np.argmax(far)), far.shape) if far.size else ()
    return LeafDifference(
        path=path,
        shape=got.shape,
        dtype=str(got.dtype),
        relative_error=float("inf") if np.isnan(error) else error,
        index=tuple(int(i) for i in index),
        got=one[index].item() if far.size else 0.0,
        expected=other[index].item() if far.size else 0.0,
    )


def _wide(leaf: np.ndarray) -> np.ndarray:
    return leaf.astype(np.complex128 if np.iscomplexobj(leaf) else np.float64)


def _is_inexact(leaf: np.ndarray) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def first_difference(wanted: Any, got: Any, root: str, *, dtypes: bool, more: bool = False) -> str:
    """The first leaf in which two trees differ, in words; empty if they do not, or if `got` only has `more`."""
    wanted, got = (
        {path_string(path, root=root): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (wanted, got)
    )
    for path in [*wanted, *got]:
        if path not in got:
            return f"no {path}"
        if path not in wanted and more:
            continue
        if path not in wanted:
            return f"{path}, which should not be there"
        shapes = [jnp.shape(leaf) for leaf in (wanted[path], got[path])]
        if shapes[0] != shapes[1]:
            return f"shape {shapes[1]} instead of {shapes[0]} at {path}"
        kinds = [_plain_dtype(leaf) if dtypes else None for leaf in (wanted[path], got[path])]
        if kinds[0] != kinds[1]:
            return f"{kinds[1]} instead of {kinds[0]} at {path}"
    return ""


def _plain_dtype(leaf: Any) -> Any:
    """The dtype that JAX computes in; None for PRNG keys, which may be of any kind."""
    try:
        dtype = jnp.result_type(leaf)
    except TypeError:  # a tensor of torch
        return f"a {type(leaf).__name__} of {getattr(leaf, 'dtype', 'no dtype')}"
    return None if jnp.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)
