"""A dtype for optimizer state: for every moment, not only those that an optimizer has an option for."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem.errors import PrecisionWithoutEffect

# Field of `optax.MultiSteps`: a sum of gradients, not a moment. In bfloat16 it would stop growing.
_SUMS = jax.tree_util.GetAttrKey("acc_grads")


def store_state_in(optimizer: optax.GradientTransformation, dtype: Any) -> optax.GradientTransformationExtraArgs:
    """The optimizer with its state stored in `dtype` between steps; it computes in at least float32.

    This covers state with the shape of its parameter: mu and nu, traces, moving averages. Factored and quantised
    state, counts, hyperparameters and the sums of `optax.MultiSteps` keep the dtypes that the optimizer gives them.
    Gradients and parameters are widened on entry as well, so bfloat16 parameters with float32 moments lose nothing;
    updates are returned in the wide dtype, and `optax.apply_updates` rounds once.

    Args:
      optimizer: any `optax.GradientTransformation`. If its `update` needs the parameters, so does the result's.
      dtype: of the stored state. In bfloat16 a nu with b2 = 0.999 cannot shrink: a thousandth less rounds back to
        the same number. Choose b2 of at most 0.99, or keep nu in float32 (`optax.adamw(mu_dtype="bfloat16")`).

    Raises:
      PrecisionWithoutEffect: in `init`, if no leaf of the state has the shape of a parameter.

    >>> import jax.numpy as jnp, optax
    >>> params = {"w": jnp.ones(4, jnp.bfloat16)}
    >>> adam = store_state_in(optax.adam(1e-3), jnp.float32).init(params)[0]
    >>> adam.mu["w"].dtype, adam.nu["w"].dtype  # optax's own mu_dtype leaves nu in bfloat16
    (dtype('float32'), dtype('float32'))
    """
    dtype = jnp.dtype(dtype)
    inner = optax.with_extra_args_support(optimizer)

    def wide(leaf):
        return leaf.astype(jnp.promote_types(leaf.dtype, jnp.promote_types(dtype, jnp.float32)))

    def init(params):
        params = _cast_floats(params, wide)
        state, count = _map_moments(inner.init(params), params, lambda leaf: leaf.astype(dtype))
        if not count:
            raise PrecisionWithoutEffect(
                wanted=f"optimizer state that can be stored in {dtype}: arrays with the shape of their parameter",
                got="an optimizer without any, such as plain SGD or one with factored or quantised state only",
                do="Leave precision.optimizer out.",
            )
        return state

    def update(updates, state, params=None, **extra_args):
        gradients = _cast_floats(updates, wide)
        state, _ = _map_moments(state, gradients, wide)
        updates, state = inner.update(gradients, state, _cast_floats(params, wide), **extra_args)
        return updates, _map_moments(state, gradients, lambda leaf: leaf.astype(dtype))[0]

    return optax.GradientTransformationExtraArgs(init, update)


def _cast_floats(tree: Any, cast: Callable) -> Any:
    return jax.tree.map(lambda leaf: cast(leaf) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, tree)


def _map_moments(state: Any, params: Any, cast: Callable) -> tuple[Any, int]:
    """The state with `cast` applied to its moments, and their number.

    A moment is a floating leaf with the shape of a parameter, and a path that ends in that parameter's path.
    """
    shapes = {path: jnp.shape(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    count = 0

    def is_moment(path, leaf) -> bool:
        if not jnp.issubdtype(leaf.dtype, jnp.floating) or _SUMS in path:
            return False
        # If the parameters are one array, its path is empty and ends every path; then a scalar leaf may be anything.
        ends = (path[start:] for start in range(len(path) + 1))
        return any(shapes.get(end) == leaf.shape and (end or leaf.shape) for end in ends)

    def each(path, leaf):
        nonlocal count
        if not is_moment(path, leaf):
            return leaf
        count += 1
        return cast(leaf)

    return jax.tree_util.tree_map_with_path(each, state), count
