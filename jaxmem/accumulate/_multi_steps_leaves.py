"""The leaves of `multi_steps`: which are trained, which need an accumulator, and what the others get."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem import _compat
from jaxmem._trainable import nothing_trained, select_paths
from jaxmem.accumulate._reduce import accumulator_dtype_of
from jaxmem.errors import StateError
from jaxmem.workload import is_array_like, path_string


def trained_leaves(params: Any, trainable: Any) -> list[bool]:
    """For each leaf, whether the inner optimizer sees it: `trainable` selects it, and its dtype is floating."""
    leaves = jax.tree.leaves(params)
    # optax.tree_map_params replaces the parameters by a tree without leaves.
    chosen = jax.tree.leaves(select_paths(params, trainable)) if leaves else []
    if leaves and not any(chosen):
        raise nothing_trained(params)
    return [bool(yes) and is_float(leaf) for leaf, yes in zip(leaves, chosen, strict=True)]


def is_float(leaf: Any) -> bool:
    """Whether a leaf can have a gradient: an array or number of floating or complex dtype."""
    return is_array_like(leaf) and jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


def only(leaves: list, chosen: list[bool]) -> list:
    """The leaves, with `optax.MaskedNode` in place of those that are not chosen."""
    return [leaf if yes else optax.MaskedNode() for leaf, yes in zip(leaves, chosen, strict=True)]


def is_absent(leaf: Any) -> bool:
    """Whether a leaf is `optax.MaskedNode`, which JAX treats as a pytree without leaves."""
    return isinstance(leaf, optax.MaskedNode)


def read_leaves(inner: optax.GradientTransformationExtraArgs, params: Any, state: Any, dtype: Any) -> Any:
    """For each leaf of `params`, whether the inner optimizer uses its gradient: a pytree of bools.

    It does not where `optax.set_to_zero` drops the gradient, or where `optax.masked` returns it unchanged, which is
    not meant as an update. Both are looked for only if the optimizer holds an `optax.masked`: the updates of an
    optimizer such as `optax.identity`, which returns all gradients unchanged, are meant.

    Args:
      params, state: of the inner optimizer.
      dtype: of the accumulators.
    """
    everything = jax.tree.map(lambda _: True, params)
    if not has_masks(state):
        return everything
    grads = jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p), accumulator_dtype_of(p, dtype)), params)
    try:
        closed, (updates, _) = jax.make_jaxpr(inner.update, return_shape=True)(grads, state, params)
    except TypeError:  # the optimizer needs keywords that only `update` gets; every leaf then gets an accumulator
        return everything
    tree = jax.tree.structure(params)
    if jax.tree.structure(updates) != tree:
        return everything
    given, made = closed.jaxpr.invars[: tree.num_leaves], closed.jaxpr.outvars
    used_for = [index >= tree.num_leaves or out is not given[index] for index, out in enumerate(made)]
    _, used = _compat.prune(closed, used_for)
    return tree.unflatten(used[: tree.num_leaves])


def has_masks(state: Any) -> bool:
    """Whether an optimizer holds an `optax.masked`, told by its state."""
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, optax.MaskedState))
    return any(isinstance(node, optax.MaskedState) for node in nodes)


def zero_accumulator(leaf: Any, dtype: Any) -> jax.Array:
    """Zeros of the leaf's shape and, also under jit, of its sharding.

    The compiler puts constant zeros on one device, or on all; zeros computed from the leaf are sharded like the leaf.
    The two zeros differ in sign, or a TPU's compiler would fold the choice into a constant.
    """
    dtype = accumulator_dtype_of(leaf, dtype)
    return jnp.where(jnp.isfinite(leaf), jnp.zeros((), dtype), jnp.full((), -0.0, dtype))


def zero_update(leaf: Any, dtype: Any = None) -> Any:
    """The update that changes no bit of a parameter: -0.0 for floats, since -0.0 + 0.0 is 0.0.

    A PRNG key cannot be added to; its update is of dtype float0, like its gradient. The update of a leaf that is no
    array is None. A constant other than 0.0 also keeps the compiler from sharing one buffer of zeros with the first
    values of the gradients, and holding it through the whole backward pass.
    """
    if is_float(leaf):
        return jnp.full_like(leaf, -0.0, dtype=jnp.result_type(leaf) if dtype is None else dtype)
    if not is_array_like(leaf):
        return None
    dtype = jnp.result_type(leaf)
    if jnp.issubdtype(dtype, jax.dtypes.extended) or dtype == jax.dtypes.float0:
        return np.zeros(np.shape(leaf), jax.dtypes.float0)
    return jnp.zeros_like(leaf)


def leaves_up_to(tree: Any, other: Any, paths: list, what: str) -> list:
    """The subtree of `other` at each leaf of `tree`; it may be None or a MaskedNode.

    Raises:
      StateError: `other` has another structure.
    """
    try:
        return tree.flatten_up_to(other)
    except ValueError as error:
        raise StateError(
            wanted=f"{what} of the parameters' structure, with leaves such as {', '.join(paths[:3]) or '-'}",
            got=str(error).splitlines()[0],
            do="Give update the gradients of the parameters, and the state that init made for them.",
        ) from None


def leaf_paths(tree: Any) -> list[str]:
    """The path of each leaf, "params/w"."""
    return [path_string(path, root="params") for path, _ in jax.tree_util.tree_leaves_with_path(tree)]


def check_gradients(grads: list, accumulators: list, paths: list[str]) -> None:
    """StateError unless each accumulator has a gradient of its shape."""
    for grad, acc, path in zip(grads, accumulators, paths, strict=True):
        if is_absent(acc):
            continue
        if not is_float(grad) or jnp.shape(grad) != jnp.shape(acc):
            got = f"{jnp.result_type(grad)}{list(jnp.shape(grad))}" if is_array_like(grad) else repr(grad)
            raise StateError(
                wanted=f"a floating-point gradient of shape {list(jnp.shape(acc))} at {path}",
                got=got,
                do="Differentiate with respect to it, or leave it out of multi_steps with `trainable`.",
            )
