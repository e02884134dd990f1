"""`to_name`: where a name keeps a value, since names reach what operations are given more often than what they made."""

import functools

import jax

from jaxmem._compat import called_jaxprs
from jaxmem.remat._kept import num_bytes
from jaxmem.remat.auto._costs import COLLECTIVES
from jaxmem.remat.auto._forward import Forward, is_float
from jaxmem.remat.blocks._facts import is_value


def to_name(forward: Forward, v):
    """The variable whose `checkpoint_name` keeps `v`, or what `v` is a cheap operation away from.

    A rule of differentiation that reads what its own operation made, like that of tanh, reads it before any name is on
    it. There it is the operand that a name keeps; `v` itself where the operand has more bytes.
    """
    made = forward.made_at.get(v)
    if made is None or not _reads_own_output(forward.jaxpr.eqns[made]):
        return v
    operands = [u for u in forward.jaxpr.eqns[made].invars if is_value(u) and is_float(u.aval)]
    largest = max(operands, key=lambda u: num_bytes(u.aval), default=v)
    return largest if num_bytes(largest.aval) <= num_bytes(v.aval) else v


def _reads_own_output(eqn) -> bool:
    """Whether an operation's derivative is made of its result."""
    floats = [is_value(u) and is_float(u.aval) for u in eqn.invars]
    if any(called_jaxprs(eqn)) or eqn.primitive.multiple_results or not any(floats):
        return False
    if eqn.primitive.name in COLLECTIVES:  # which want the axes of a mesh round them
        return False

    def differentiated(*values):
        outs, pull_back = jax.vjp(functools.partial(eqn.primitive.bind, **eqn.params), *values)
        return [outs, *jax.tree.leaves(pull_back)]

    try:
        jaxpr = jax.make_jaxpr(differentiated)(*[u.aval if is_value(u) else u.val for u in eqn.invars]).jaxpr
    except (TypeError, ValueError, NameError, NotImplementedError):  # what has no derivative, or not by itself
        return False
    out, *residuals = jaxpr.outvars
    reached = {out}
    for each in jaxpr.eqns:
        if any(u in reached for u in each.invars if is_value(u)):
            reached.update(each.outvars)
    return any(u in reached for u in residuals if is_value(u))
