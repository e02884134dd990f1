"""`inlined`: a program without the calls in it, so that every value of it can be chosen by itself."""

import jax
import jax.extend.core as jex

from jaxmem._compat import call_to_inline
from jaxmem.remat.blocks._facts import body_of, is_value
from jaxmem.remat.blocks._run import function_of, scope_of


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
    return jax.make_jaxpr(lambda *args: _run(jaxpr, consts, args))(*[v.aval for v in jaxpr.invars])


def _run(jaxpr, consts, args) -> list:
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom):
        return env[atom] if is_value(atom) else atom.val

    plain = []

    def flush():
        made = {v for eqn in plain for v in eqn.outvars}
        inputs = list(dict.fromkeys(v for eqn in plain for v in eqn.invars if is_value(v) and v not in made))
        outputs = list(made)
        if plain:
            env.update(zip(outputs, function_of(plain, inputs, outputs)(*map(read, inputs)), strict=True))
        plain.clear()

    for eqn in jaxpr.eqns:
        call = call_to_inline(eqn)
        if call is None:
            plain.append(eqn)
            continue
        flush()
        inner, inner_consts = body_of(call)
        with scope_of(eqn):
            outs = _run(inner, inner_consts, [read(v) for v in eqn.invars])
        env.update(zip(eqn.outvars, outs, strict=True))
    flush()
    return [read(v) for v in jaxpr.outvars]
