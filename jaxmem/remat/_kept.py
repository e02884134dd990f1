"""The values that differentiation keeps, as variables of one traced program."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex

from jaxmem.targets import in_mesh, mesh_of


def kept_values(fn: Callable, *args, argnums: int | None = None) -> tuple[Any, tuple[jex.Var, ...]]:
    """The jaxpr of `jax.vjp(fn, *args)`'s forward pass, and those of its variables that are kept.

    Arguments and constants are not among them: those bytes are there anyway. A value kept twice counts once.

    Args:
      fn: function of floating-point pytrees with any pytree output.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      argnums: the argument that is differentiated; None for all of them.
    """

    def kept(*args):
        if argnums is None:
            return jax.tree.leaves(jax.vjp(fn, *args)[1])  # a vjp function is a pytree of its residuals
        before, after = args[:argnums], args[argnums + 1 :]
        return jax.tree.leaves(jax.vjp(lambda arg: fn(*before, arg, *after), args[argnums])[1])

    with in_mesh(mesh_of(mixed=True, arguments=args), args):
        jaxpr = jax.make_jaxpr(kept)(*args).jaxpr
    given = {*jaxpr.invars, *jaxpr.constvars}
    values = dict.fromkeys(v for v in jaxpr.outvars if not isinstance(v, jex.Literal) and v not in given)
    return jaxpr, tuple(values)


def num_bytes(aval) -> int:
    """Bytes of an abstract array; of a key array, those of its data; a token has none."""
    if not hasattr(aval, "shape") or not hasattr(aval, "dtype"):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize


def is_on_host(aval) -> bool:
    """Whether an abstract array waits in host memory."""
    return getattr(aval, "memory_space", None) == jax.memory.Space.Host
