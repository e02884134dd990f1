"""How a traced program draws its random bits: what its compiler's output no longer tells."""

from collections.abc import Iterator
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp

from jaxmem._compat import called_jaxprs


def how_it_draws(program: jex.ClosedJaxpr | None) -> dict[str, bool]:
    """Whether masks are fenced, and whether every draw is the hardware's; by the fields of `Asked`.

    >>> import jax
    >>> draw = lambda key: jax.lax.optimization_barrier(jax.random.bernoulli(key, shape=(8,)))
    >>> how_it_draws(jax.make_jaxpr(draw)(jax.random.key(0, impl="rbg")))
    {'fenced': True, 'by_hardware': True}
    """
    if program is None:
        return {}
    generators, fenced = set(), False
    for eqn in _equations(program.jaxpr, set()):
        if eqn.primitive.name == "random_bits":
            generators.add(str(getattr(eqn.invars[0].aval, "dtype", "")))
        elif eqn.primitive.name == "optimization_barrier":
            fenced |= [getattr(v.aval, "dtype", None) for v in eqn.outvars] == [jnp.bool_]
    return {"fenced": fenced, "by_hardware": generators == {"key<rbg>"}}


def _equations(jaxpr: Any, seen: set[int]) -> Iterator[jex.JaxprEqn]:
    """The equations of a program and of all that they call, each of these once."""
    if id(jaxpr) in seen:
        return
    seen.add(id(jaxpr))
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in called_jaxprs(eqn):
            yield from _equations(inner, seen)
