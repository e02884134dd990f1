"""What the forward pass of a function keeps for its backward pass."""

import math
from collections.abc import Callable

import jax
import jax.extend.core as jex
import jax.numpy as jnp


def residual_bytes(fn: Callable, *args, argnums: int | None = None) -> int:
    """Bytes of the values that `jax.vjp(fn, *args)` keeps, besides the arguments themselves; modelled.

    A value kept twice counts once, and so does one that is an argument not at all: those bytes are there anyway.
    The compiler may keep fewer (it fuses and recomputes cheap operations) or more (copies): residual
    bytes order policies, compiled bytes decide.

    Args:
      fn: function of floating-point pytrees with any pytree output.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      argnums: the argument that is differentiated; None for all of them.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((256,), jnp.float32)
    >>> residual_bytes(lambda x: jnp.sin(jnp.sin(x)), x)
    2048
    """

    def kept(*args):
        if argnums is None:
            _, vjp = jax.vjp(fn, *args)
        else:
            _, vjp = jax.vjp(lambda arg: fn(*args[:argnums], arg, *args[argnums + 1 :]), args[argnums])
        return jax.tree.leaves(vjp)  # a vjp function is a pytree of its residuals

    jaxpr = jax.make_jaxpr(kept)(*args).jaxpr
    given = set(jaxpr.invars) | set(jaxpr.constvars)
    residuals = {v for v in jaxpr.outvars if not isinstance(v, jex.Literal)} - given
    return sum(_num_bytes(v.aval) for v in residuals)


def _num_bytes(aval) -> int:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        aval = jax.eval_shape(jax.random.key_data, aval)
    return math.prod(aval.shape) * aval.dtype.itemsize
