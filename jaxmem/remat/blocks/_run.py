"""Equations of a jaxpr as a function, and under their scopes, as JAX itself runs them."""

import contextlib
from collections.abc import Callable

import jax
import jax.extend.core as jex

from jaxmem._compat import name_stack

_DEBUG_INFO = jex.DebugInfo("jaxmem block", "jaxmem.remat.blocks", None, None)


def function_of(eqns, inputs, outputs) -> Callable[..., list]:
    """What equations make of values of `inputs`: those of `outputs`; with their scopes and source lines."""
    run = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr_of(eqns, inputs, outputs), ()))

    def block(*args):
        return run(*args)

    return block


def jaxpr_of(eqns, inputs, outputs, effects=frozenset()) -> jex.Jaxpr:
    """A program without constants of equations of another."""
    return jex.Jaxpr((), inputs, outputs, eqns, effects, _DEBUG_INFO)


def scope_of(eqn):
    """A context with the equation's named scopes, for what is run in its place; a transformation's cannot be opened."""
    scope = name_stack(eqn)
    return jax.named_scope(scope) if scope and "(" not in scope else contextlib.nullcontext()
