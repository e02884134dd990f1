"""`cover`: what lies before the first block, between blocks and after the last, as blocks of its own."""

import dataclasses

import jax.extend.core as jex

from jaxmem.jaxprs import Facts
from jaxmem.remat.blocks._find import find_plan
from jaxmem.remat.blocks._names import HEAD, STEM, WHOLE, before_name, equation_name
from jaxmem.remat.blocks._plan import Interval, Plan, interval

# Of what all equations keep. A smaller stretch is not worth its time in the solver.
_SHARE = 0.02


def cover(closed_jaxpr: jex.ClosedJaxpr) -> Plan | None:
    """As `find_plan`, with what is outside of blocks in blocks too; where nothing repeats, the whole is one block.

    None where nothing may run a second time.
    """
    plan = find_plan(closed_jaxpr)
    if plan is not None:
        return _with_stems(plan)
    facts = Facts.of(closed_jaxpr)
    block = interval(facts, "structure", WHOLE, 0, len(facts.eqns), split=False)
    return None if block is None else Plan(facts=facts, items=(block,))


def _with_stems(plan: Plan) -> Plan:
    """The plan with large stretches outside of its blocks as blocks, such as the first layers of a ResNet.

    What they keep is there until the backward pass ends; but what comes after the last block, such as a loss's logits,
    is gone when the backward pass comes to the others.
    """
    facts = plan.facts
    everything = facts.inside_bytes(range(len(facts.eqns)))
    items, at = [], 0
    for item in plan.items:
        if at < item.start and facts.inside_bytes(range(at, item.start)) > _SHARE * everything:
            block = _between(plan, at, item.start, before_name(_name(item)) if items or at else STEM)
            items += [] if block is None else [block]
        items.append(item)
        at = item.stop
    end = len(facts.eqns)
    if facts.inside_bytes(range(at, end)) > _SHARE * everything:
        items += filter(None, [_between(plan, at, end, HEAD)])
    return dataclasses.replace(plan, items=tuple(items))


def _between(plan: Plan, start: int, stop: int, name: str) -> Interval | None:
    block = interval(plan.facts, "structure", name, start, stop, split=False)
    if block is None:
        return None
    (part,) = block.parts
    gains = plan.facts.inside_bytes(part) > plan.facts.boundary_bytes(part)
    return block if gains else None


def _name(item) -> str:
    return item.name if isinstance(item, Interval) else equation_name("equation", item.start)
