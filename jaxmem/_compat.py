"""Every private or version-dependent touch of JAX, Flax and Optax; each has a test that tells when it can go."""

import jax.extend.core as jex
from jax.interpreters import partial_eval

# Effects of printing and of host callbacks: their names, since the classes are private.
_IO_EFFECTS = ("DebugEffect", "OrderedDebugEffect", "IOEffect", "OrderedIOEffect")


def prune(closed: jex.ClosedJaxpr, wanted: list[bool]) -> tuple[jex.ClosedJaxpr, list[bool]]:
    """Cuts a jaxpr to the wanted outputs, dropping prints and callbacks that they do not need.

    Returns the smaller jaxpr, whose inputs are those marked True in the second result. Touches
    `jax.interpreters.partial_eval.dce_jaxpr`, which has no public equivalent with `used_outputs`.
    """
    pruned, used = partial_eval.dce_jaxpr(_without_io_effects(closed.jaxpr), list(wanted))
    return jex.ClosedJaxpr(pruned, closed.consts), list(used)


def _without_io_effects(jaxpr):
    """The jaxpr with io effects erased at every depth, so that dead-code elimination may drop them."""

    def erase(effects):
        return frozenset(e for e in effects if type(e).__name__ not in _IO_EFFECTS)

    def inner(param):
        if isinstance(param, jex.ClosedJaxpr):
            return jex.ClosedJaxpr(_without_io_effects(param.jaxpr), param.consts)
        if isinstance(param, jex.Jaxpr):
            return _without_io_effects(param)
        if isinstance(param, (tuple, list)) and any(isinstance(p, (jex.Jaxpr, jex.ClosedJaxpr)) for p in param):
            return type(param)(inner(p) for p in param)
        return param

    if not jaxpr.effects:
        return jaxpr
    eqns = [
        eqn.replace(params={k: inner(v) for k, v in eqn.params.items()}, effects=erase(eqn.effects))
        if eqn.effects
        else eqn
        for eqn in jaxpr.eqns
    ]
    return jaxpr.replace(eqns=eqns, effects=erase(jaxpr.effects))
