"""A jaxpr run equation by equation, so that two programs can be compared without compiling either.

Loops, branches and calls run in Python; all else by JAX, one small kernel for each kind of operation and shape. Nothing
is fused, so equal operations give equal bits, in 16 bits too.
"""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxmem._compat import called_jaxprs, scan_layout
from jaxmem.jaxprs import body_of, is_value

# What only says where or when something is computed.
_IDENTITIES = frozenset({"optimization_barrier", "device_put", "copy", "copy_p", "name"})
_INFO = jex.DebugInfo("interpret", "benchmarks._interpret", None, None)


def interpret(closed: jex.ClosedJaxpr, *args) -> list:
    """The outputs of a program.

    >>> program = jax.make_jaxpr(lambda x: jax.lax.fori_loop(0, 3, lambda i, h: h * x, 1.0))(2.0)
    >>> [float(out) for out in interpret(program, 2.0)]
    [8.0]
    """
    jaxpr, consts = body_of(closed)
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True))

    def read(atom):
        return env[atom] if is_value(atom) else atom.val

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _run(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _run(eqn, values: list) -> list:
    name = eqn.primitive.name
    if name in _IDENTITIES:
        return values
    if name == "scan":
        return _scan(eqn, values)
    if name == "while":
        return _while(eqn, values)
    if name == "cond":
        branches = eqn.params["branches"]
        return interpret(branches[int(np.clip(int(values[0]), 0, len(branches) - 1))], *values[1:])
    for program in called_jaxprs(eqn):  # a scatter has one, too: for two numbers
        if len(program.invars) == len(values) and len(program.outvars) == len(eqn.outvars):
            closed = [p for p in eqn.params.values() if getattr(p, "jaxpr", p) is program]
            return interpret(closed[0], *values)
    inputs = list(dict.fromkeys(v for v in eqn.invars if is_value(v)))
    program = jex.Jaxpr((), inputs, eqn.outvars, [eqn], eqn.effects, _INFO)
    known = {v: value for v, value in zip(eqn.invars, values, strict=True) if is_value(v)}
    return jex.jaxpr_as_fun(jex.ClosedJaxpr(program, ()))(*[known[v] for v in inputs])


def _scan(eqn, values: list) -> list:
    num_consts, num_carry, _ = scan_layout(eqn)
    consts, carry, xs = values[:num_consts], values[num_consts:][:num_carry], values[num_consts + num_carry :]
    length, rows = eqn.params["length"], []
    turns = range(length)[::-1] if eqn.params["reverse"] else range(length)
    for i in turns:
        outs = interpret(eqn.params["jaxpr"], *consts, *carry, *(_row(x, i) for x in xs))
        carry = outs[:num_carry]
        rows.append(outs[num_carry:])
    if eqn.params["reverse"]:
        rows.reverse()
    empty = [jnp.zeros(v.aval.shape, v.aval.dtype) for v in eqn.outvars[num_carry:]] if not rows else []
    return [*carry, *(empty or map(_stack, zip(*rows, strict=True)))]


def _while(eqn, values: list) -> list:
    given = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    tests, bodies, carry = values[: given[0]], values[given[0] : sum(given)], values[sum(given) :]
    while bool(interpret(eqn.params["cond_jaxpr"], *tests, *carry)[0]):
        carry = interpret(eqn.params["body_jaxpr"], *bodies, *carry)
    return carry


def _row(x, i: int):
    return x[i] if _is_key(x) else np.asarray(x)[i]


def _stack(rows):
    return jnp.stack(rows) if _is_key(rows[0]) else np.stack([np.asarray(row) for row in rows])


def _is_key(x) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.extended)
