"""Equations run as JAX itself runs a jaxpr, with their scopes and source lines; blocks with rules of their own."""

import contextlib
from collections.abc import Callable

import jax
import jax.extend.core as jex

from jaxmem._compat import call_to_inline, name_stack, without_tangents
from jaxmem.jaxprs._equations import body_of, inputs_of, is_value

_DEBUG_INFO = jex.DebugInfo("jaxmem block", "jaxmem.remat.blocks", None, None)


def function_of(eqns, inputs, outputs) -> Callable[..., list]:
    """A function of the values of `inputs` that runs equations and returns the values of `outputs`."""
    run = jex.jaxpr_as_fun(jex.ClosedJaxpr(jaxpr_of(eqns, inputs, outputs), ()))

    def block(*args):
        return run(*args)

    return block


def jaxpr_of(eqns, inputs, outputs, effects=frozenset()) -> jex.Jaxpr:
    """A program without constants, made of equations of another."""
    return jex.Jaxpr((), inputs, outputs, eqns, effects, _DEBUG_INFO)


def scope_of(eqn):
    """A context with the named scopes of an equation, for what runs in its place.

    A transformation's scope cannot be opened, so there the context does nothing.
    """
    scope = name_stack(eqn)
    return jax.named_scope(scope) if scope and "(" not in scope else contextlib.nullcontext()


def reader(env: dict) -> Callable:
    """A function of an atom: the value of a variable in `env`, or a literal's own."""
    return lambda atom: env[atom] if is_value(atom) else atom.val


def evaluate_with(jaxpr: jex.Jaxpr, consts, args, instead: Callable) -> list:
    """The outputs of a program; where `instead(eqn)` is a function of its inputs, that runs in the equation's place."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))
    read, waiting = reader(env), []

    def run_waiting():
        inputs, outputs = inputs_of(waiting), [v for eqn in waiting for v in eqn.outvars]
        if waiting:
            env.update(zip(outputs, function_of(waiting, inputs, outputs)(*map(read, inputs)), strict=True))
        waiting.clear()

    for eqn in jaxpr.eqns:
        run = instead(eqn)
        if run is None:
            waiting.append(eqn)
            continue
        run_waiting()
        env.update(zip(eqn.outvars, run(*map(read, eqn.invars)), strict=True))
    run_waiting()
    return [read(v) for v in jaxpr.outvars]


def inlined(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """The same program with the bodies of `jax.jit` calls in their place; scans, branches and custom rules stay.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(lambda x: jax.jit(jnp.sin)(x) + 1)(1.0)
    >>> [eqn.primitive.name for eqn in inlined(program).eqns]
    ['sin', 'add']
    """
    jaxpr, consts = body_of(closed)
    if not any(call_to_inline(eqn) for eqn in jaxpr.eqns):
        return closed

    def body(eqn):
        call = call_to_inline(eqn)
        if call is None:
            return None
        inner, inner_consts = body_of(call)

        def run(*args):
            with scope_of(eqn):
                return evaluate_with(inner, inner_consts, args, body)

        return run

    return jax.make_jaxpr(lambda *args: evaluate_with(jaxpr, consts, args, body))(*[v.aval for v in jaxpr.invars])


def _never(*_):
    raise NotImplementedError("only what is kept for it is looked at")


def with_rule(fn: Callable, forward: Callable, backward: Callable = _never) -> Callable[..., list]:
    """`fn` of flat arrays as a function with its own derivative.

    Args:
      fn: the function, which returns a list.
      forward: the forward rule of a `jax.custom_vjp` with symbolic zeros.
      backward: the backward rule; without it the function is for looking at what is kept.
    """

    @jax.custom_vjp
    def block(*args):
        return list(fn(*args))

    block.defvjp(forward, backward, symbolic_zeros=True)
    return lambda *args: without_tangents(block(*args))


def keeping_nothing(fn: Callable, **_) -> Callable[..., list]:
    """A block that keeps nothing, to look at what is kept besides; it cannot be differentiated for real."""
    return with_rule(fn, lambda *primals: (list(fn(*(p.value for p in primals))), ()))
