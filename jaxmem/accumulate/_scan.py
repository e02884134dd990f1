"""`lax.scan` for a carry that begins as zeros, also where values are typed by the mesh axes they vary over."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._compat import varying_axes


def scan(body: Callable, init: Any, count: int, shapes: Any) -> Any:
    """The carry after `body(carry, index)` for 0, 1, … `count` - 1.

    Within a `jax.shard_map` zeros vary over no axis of the mesh, and what is added to them may: a scan wants the type
    that the carry comes to from the first.

    Args:
      shapes: of what a micro-batch's loss returns; where none of it varies, nothing is looked at twice.
    """
    if any(varying_axes(leaf) for leaf in jax.tree.leaves(shapes)):
        before = None
        while before != (before := [varying_axes(leaf) for leaf in jax.tree.leaves(init)]):
            after, _ = jax.eval_shape(body, init, jnp.zeros((), jnp.int32))
            init = jax.tree.map(_varying_as, init, after)
    return jax.lax.scan(body, init, jnp.arange(count))[0]


def _varying_as(value, like):
    missing = varying_axes(like) - varying_axes(value)
    return jax.lax.pcast(value, tuple(sorted(missing)), to="varying") if missing else value
