"""Equations run as JAX itself runs a jaxpr, with their scopes and source lines; blocks with rules of their own."""

import contextlib
from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex

from jaxmem._compat import call_to_inline, name_stack, without_tangents
from jaxmem.jaxprs._equations import (
    USER_CHECKPOINT,
    body_of,
    body_params,
    inputs_of,
    is_nested_scan,
    is_value,
    with_body_params,
)

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


def run_with_bodies(eqn: jex.JaxprEqn, functions: Sequence[Callable | None], args: Sequence) -> list:
    """The outputs of an equation with functions in the place of its bodies; everything else about it stays.

    Args:
      eqn: with a `body_key`.
      functions: one for each body, of what that takes; None leaves a body as it is.
      args: what the equation takes.
    """
    name, params = eqn.primitive.name, eqn.params
    if name == "shard_map" or name in USER_CHECKPOINT or is_nested_scan(eqn):
        (body,) = functions
        assert body is not None
        if name == "shard_map":  # brings the axes that its trace needs
            body = shard_mapped(eqn, body)
        elif name in USER_CHECKPOINT:
            body = jax.checkpoint(body, policy=params["policy"], prevent_cse=params["prevent_cse"])
        with scope_of(eqn):
            return body(*args)  # a nested scan brings its own derivative
    new = [retraced(fn, program) if fn else program for fn, program in zip(functions, body_params(eqn), strict=True)]
    values = {v: value for v, value in zip(eqn.invars, args, strict=True) if is_value(v)}
    return function_of([with_body_params(eqn, new)], list(values), eqn.outvars)(*values.values())


def retraced(fn: Callable, program) -> jex.ClosedJaxpr:
    """The program of a function that takes what another program takes."""
    return jax.make_jaxpr(fn)(*[v.aval for v in body_of(program)[0].invars])


def shard_mapped(eqn: jex.JaxprEqn, body: Callable) -> Callable:
    """A function under the `jax.shard_map` of an equation."""
    return jax.shard_map(
        body,
        mesh=eqn.params["mesh"],
        in_specs=tuple(eqn.params["in_specs"]),
        out_specs=list(eqn.params["out_specs"]),
        check_vma=eqn.params["check_vma"],
        axis_names=set(eqn.params["newly_manual_axes"]),
    )


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

    return retraced(lambda *args: evaluate_with(jaxpr, consts, args, body), closed)


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
