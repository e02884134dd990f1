"""Runs a jaxpr with a wrapper round each of its blocks."""

from collections.abc import Callable, Mapping

import jax.extend.core as jex
from jax import lax

from jaxmem._compat import prevents_cse, scan_layout, with_cotangent
from jaxmem.jaxprs import (
    Facts,
    bodies,
    body_key,
    keeping_nothing,
    nested_segments,
    programs_of,
    reader,
    retraced,
    run_with_bodies,
    tie,
)
from jaxmem.remat._nested_scan import nested_scan_of
from jaxmem.remat.blocks._names import equation_name
from jaxmem.remat.blocks._plan import Inside, Interval, Plan, scanned_block, with_cheap_inputs
from jaxmem.remat.blocks._ties import (
    ends_together,
    program_of,
    scans_layers,
    stretches,
    tie_of_block,
    tie_of_stretch,
    tied_program,
)

_NO_SEGMENTS: Mapping[str | None, tuple[int, ...]] = {}


def evaluate(
    plan: Plan,
    consts,
    args,
    wrap: Callable | None,
    *,
    scanned: bool = False,
    segments=_NO_SEGMENTS,
    order: str = "free",
    summed: frozenset = frozenset(),
) -> list:
    """The outputs of the plan's jaxpr. Equations run as JAX itself runs a jaxpr: with their scopes and source lines.

    Args:
      plan: the jaxpr and its blocks.
      consts, args: of the jaxpr.
      wrap: as of `apply_at_blocks`; None leaves blocks as they are.
      scanned: the jaxpr is the body of a scan.
      segments: by the name of a block that is the whole body of a scan, lengths of the segments in which the scan is
        run, as of `nested_scan`; the block must be in a checkpoint.
      order: "tied", with ties at blocks and at what has matmuls after one; "head", with one at the last of that alone,
        where it was seen to pay; or "free".
      summed: variables whose gradients are sums over the steps of a scan, made in place: no tie lies on them.
    """
    facts = plan.facts
    env = dict(zip((*facts.jaxpr.constvars, *facts.jaxpr.invars), (*consts, *args), strict=True))
    read = reader(env)

    def run(indices, outputs, around=lambda fn: fn, tied: str | None = None):
        if indices:
            inputs = facts.inputs(indices)
            if tied is None:
                fn = around(program_of(facts, indices, inputs, outputs))
            else:
                fn = around(tied_program(facts, indices, outputs, tied, summed))
            given = [read(v) for v in inputs]
            if getattr(fn, "has_own_rule", False):
                given = [with_cotangent(x) if facts.is_stacked(v) else x for v, x in zip(inputs, given, strict=True)]
            made = fn(*given)
            # A custom rule gives derivatives to all of its outputs, also to those that must not have one.
            made = [lax.stop_gradient(x) if v in facts.constant else x for v, x in zip(outputs, made, strict=True)]
            env.update(zip(outputs, made, strict=True))

    at, before = 0, None  # what layers come before: "unrolled", or a "scan"
    for item in (*plan.items, None):
        end = len(facts.eqns) if item is None else item.start
        for stretch in [list(range(at, end))] if order == "free" else stretches(facts, at, end):
            last = stretch[-1:] == [len(facts.eqns) - 1]
            tied = tie_of_stretch(facts, stretch, order, before, last=last)
            before = before or (tied and "unrolled")
            run(stretch, facts.outputs(stretch), tied=tied)
        if isinstance(item, Interval):
            for name, part in item.named_parts:
                outputs, tied = facts.outputs(part), tie_of_block(facts, part, name, order, before)
                if wrap is None:
                    run(part, outputs, tied=tied)
                    continue

                def around(fn, name=name):
                    fn.__name__ = name
                    return wrap(fn, scanned=scanned, name=name)

                run(with_cheap_inputs(facts, part), outputs, around, tied)
            run(item.rest, facts.outputs(item.rest))
        elif isinstance(item, Inside):
            eqn = facts.eqns[item.start]
            values = [read(v) for v in eqn.invars]
            if order == "tied" and prevents_cse(eqn) is not None:
                values = tie(values, equation_name("checkpoint", item.start))
            outs = _run_with_bodies(facts, item, values, wrap, segments, order)
            env.update(zip(eqn.outvars, outs, strict=True))
        at, before = (end if item is None else item.stop), "scan" if scans_layers(facts, item) else "unrolled"
    return [read(v) for v in facts.jaxpr.outvars]


def _run_with_bodies(facts: Facts, item: Inside, args: list, wrap: Callable | None, segments, order: str) -> list:
    """One equation, its bodies traced again with their blocks wrapped."""
    eqn = facts.eqns[item.start]
    scanned = eqn.primitive.name == "scan" and eqn.params["length"] > 1
    if eqn.primitive.name == "scan" and (order == "head" or ends_together(eqn, item)):
        order = "free"

    def inner(plan: Plan, jaxpr, consts):
        summed = frozenset(jaxpr.invars[: scan_layout(eqn)[0]] if scanned else ())
        options = {"scanned": scanned, "segments": segments, "order": order, "summed": summed}
        return lambda *args: evaluate(plan, consts, args, wrap, **options)

    pairs = zip(item.plans, programs_of(eqn), strict=True)
    functions = [None if plan is None else inner(plan, *program) for plan, program in pairs]
    cuts = nested_segments(eqn) or segments.get(scanned_block(eqn, item))
    if cuts:
        (body,) = filter(None, functions)
        num_consts, num_carry, _ = scan_layout(eqn)
        return nested_scan_of(retraced(body, eqn.params["jaxpr"]), cuts, eqn.params, num_consts, num_carry, args)
    return run_with_bodies(eqn, functions, args)


def without_marked(jaxpr: jex.Jaxpr) -> Callable[..., list] | None:
    """A function of a jaxpr's inputs whose checkpoints keep nothing; None where there are none."""
    plan = plan_marked(Facts.of(jaxpr))
    if plan is None:
        return None
    return lambda consts, *inputs: evaluate(plan, consts, inputs, keeping_nothing)


def plan_marked(facts: Facts) -> Plan | None:
    items = []
    for i, eqn in enumerate(facts.eqns):
        if prevents_cse(eqn) is not None:
            items.append(
                Interval(kind="module", name=equation_name("checkpoint", i), start=i, stop=i + 1, parts=((i,),))
            )
        elif body_key(eqn) in eqn.params:
            plans = tuple(plan_marked(facts.of_body(eqn, which)) for which in range(len(bodies(eqn))))
            if any(plan is not None for plan in plans):
                items.append(Inside(start=i, plans=plans))
    return Plan(facts=facts, items=tuple(items)) if items else None
