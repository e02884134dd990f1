"""`marked`: the blocks of a program that are in a checkpoint already, and what is kept outside of them."""

from collections.abc import Callable

import jax
import jax.extend.core as jex

from jaxmem._compat import prevents_cse, without_tangents
from jaxmem.remat.blocks._apply import evaluate
from jaxmem.remat.blocks._facts import Facts, bodies, body_key
from jaxmem.remat.blocks._plan import Inside, Interval, Plan


def keeping_nothing(fn: Callable, **_) -> Callable:
    """A block of which nothing is kept, to look at what is kept besides; it cannot be differentiated for real."""

    @jax.custom_vjp
    def block(*args):
        return list(fn(*args))

    def forward(*primals):
        return list(fn(*(p.value for p in primals))), ()

    block.defvjp(forward, never, symbolic_zeros=True)
    return lambda *args: without_tangents(block(*args))


def never(*_):
    """A backward rule that never runs."""
    raise NotImplementedError("only what is kept for it is looked at")


def without_marked(jaxpr: jex.Jaxpr) -> Callable[..., list] | None:
    """A function of a jaxpr's inputs whose checkpoints keep nothing; None where there are none."""
    plan = _plan(Facts(jaxpr, frozenset(jaxpr.invars)))
    if plan is None:
        return None
    return lambda consts, *inputs: evaluate(plan, consts, inputs, keeping_nothing)


def _plan(facts: Facts) -> Plan | None:
    items = []
    for i, eqn in enumerate(facts.eqns):
        if prevents_cse(eqn) is not None:
            items.append(Interval(kind="module", name=f"checkpoint {i}", start=i, stop=i + 1, parts=((i,),)))
        elif body_key(eqn) in eqn.params:
            plans = tuple(_plan(facts.of_body(eqn, which)) for which in range(len(bodies(eqn))))
            if any(plan is not None for plan in plans):
                items.append(Inside(start=i, plans=plans))
    return Plan(facts=facts, items=tuple(items)) if items else None
