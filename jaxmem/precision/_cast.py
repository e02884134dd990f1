"""Casting the arguments of a loss to the compute dtype."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp


def cast_floating(tree: Any, dtype: Any) -> Any:
    """The pytree with its real floating leaves in `dtype`; integers, keys and complex leaves keep their dtype.

    >>> import jax.numpy as jnp
    >>> cast_floating({"x": jnp.ones(2), "n": jnp.arange(2)}, jnp.bfloat16)["x"].dtype
    dtype(bfloat16)
    """

    def cast(leaf):
        return leaf.astype(dtype) if jnp.issubdtype(jnp.result_type(leaf), jnp.floating) else leaf

    return jax.tree.map(lambda leaf: cast(jnp.asarray(leaf)), tree)


def compute_in(loss_fn: Callable, dtype: Any, *, keep: Callable | None = None) -> Callable:
    """The loss with its parameters and batch cast to `dtype` on entry.

    Args:
      loss_fn: `loss_fn(params, batch, **keywords)`.
      dtype: a floating dtype.
      keep: `keep(loss_fn, params, batch, **keywords)` returns a tree of bools over the batch, True for leaves that
        keep their dtype, such as masks that are counted.

    The cast is inside the differentiated function, so gradients have the dtype of the master
    parameters. Model state keeps its dtype: running statistics need the wide one.
    """

    @functools.wraps(loss_fn)
    def loss(params, batch, **keywords):
        narrow = cast_floating(batch, dtype)
        if keep is not None:
            kept = keep(loss_fn, params, batch, **keywords)
            narrow = jax.tree.map(lambda wide, cast, stays: wide if stays else cast, batch, narrow, kept)
        return loss_fn(cast_floating(params, dtype), narrow, **keywords)

    return loss


def uses_dtype(jaxpr: jex.Jaxpr, dtype: Any) -> bool:
    """Whether any equation of the jaxpr, at any depth, computes a value of `dtype`."""
    for eqn in jaxpr.eqns:
        if any(getattr(v.aval, "dtype", None) == dtype for v in eqn.outvars):
            return True
        if any(uses_dtype(inner, dtype) for inner in jex.jaxprs_in_params(eqn.params)):
            return True
    return False
