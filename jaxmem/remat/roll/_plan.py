"""Where like layers are in a program and in the bodies in it, and how it runs with them in scans."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.extend.core as jex

from jaxmem.jaxprs import (
    Facts,
    Tokens,
    bodies,
    body_key,
    function_of,
    is_nested_scan,
    nested_segments,
    num_bytes,
    programs_of,
    reader,
    run_with_bodies,
    scopes_of,
    shard_mapped,
)
from jaxmem.remat.blocks import find_repeat, scopes_name
from jaxmem.remat.roll._layers import Layers, layers_of
from jaxmem.remat.roll._run import array_of, run_layers
from jaxmem.remat.roll._same import Different, Parallel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bodies:
    """The equation at `start`, with a plan for each of its bodies."""

    start: int
    plans: "tuple[Plan, ...]"

    @property
    def stop(self) -> int:
        return self.start + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A program, what of it runs in scans, in the order of its equations, and why other layers do not."""

    facts: Facts
    items: tuple[Layers | Bodies, ...]
    refused: tuple[str, ...]

    def all_layers(self) -> Iterator[tuple[str, Layers, dict[str, int]]]:
        """(name, layers, bytes stacked by dtype) at every depth."""
        for item in self.items:
            if isinstance(item, Bodies):
                for plan in item.plans:
                    yield from plan.all_layers()
                continue
            first = self.facts.eqns[item.start : item.start + (item.stop - item.start) // item.count]
            yield scopes_name([scopes_of(eqn) for eqn in first]), item, self._stacked_bytes(item)

    def all_refused(self) -> Iterator[str]:
        yield from self.refused
        for item in self.items:
            if isinstance(item, Bodies):
                for plan in item.plans:
                    yield from plan.all_refused()

    def _stacked_bytes(self, layers: Layers) -> dict[str, int]:
        sizes: dict[str, int] = {}
        for var, atoms in layers.stacked:
            found = array_of(self.facts, atoms)
            if found is None or found.casts:
                aval: Any = var.aval
                dtype = str(aval.dtype)
                sizes[dtype] = sizes.get(dtype, 0) + layers.count * num_bytes(var.aval)
        return sizes


def plan_of(program) -> Plan:
    """Where like layers are in a program."""
    return _planned(Facts.of(program, marked=True))


def _planned(facts: Facts) -> Plan:
    tokens, refused = Tokens(facts), []

    def search(start: int, stop: int) -> list:
        units = find_repeat(facts, tokens, start, stop) if facts.num_heavy(start, stop) > 1 else []
        if not units:
            return inside(start, stop)
        items, at = [], units[0][0]
        for layers in _longest(facts, units, refused):
            items += between(at, layers.start, units) + [layers]
            at = layers.stop
        last = units[-1][1]
        return search(start, units[0][0]) + items + between(at, last, units) + search(last, stop)

    def between(start: int, stop: int, units: list) -> list:
        """What is in units that are not rolled: two calls of an encoder hold layers each."""
        return [item for unit in units if start <= unit[0] < stop for item in search(*unit)]

    def inside(start: int, stop: int) -> list:
        items = []
        for i in range(start, stop):
            eqn = facts.eqns[i]
            if facts.heavy[i] and body_key(eqn) and not is_nested_scan(eqn) and not nested_segments(eqn):
                plans = _of_bodies(facts, eqn)
                if any(plan.items or plan.refused for plan in plans):
                    items.append(Bodies(start=i, plans=plans))
        return items

    items = search(0, len(facts.eqns))
    return Plan(facts=facts, items=tuple(items), refused=tuple(dict.fromkeys(refused)))


def _of_bodies(facts: Facts, eqn: jex.JaxprEqn) -> tuple[Plan, ...]:
    if eqn.primitive.name != "shard_map":
        return tuple(_planned(facts.of_body(eqn, which)) for which in range(len(bodies(eqn))))
    found = []

    def body(*args):  # rules of custom derivatives are traced, which needs the axes of the mesh
        found.append(_planned(facts.of_body(eqn)))
        return jex.jaxpr_as_fun(jex.ClosedJaxpr(bodies(eqn)[0], ()))(*args)

    jax.make_jaxpr(shard_mapped(eqn, body))(*[v.aval for v in eqn.invars])
    return (found[0],)


def _longest(facts: Facts, units: list[tuple[int, int]], refused: list[str]) -> list[Layers]:
    """The longest runs of units that are alike, of two and more; why others are not goes to `refused`."""
    found, first, why = [], 0, ""
    while first < len(units) - 1:
        best, low, high = None, first + 2, len(units)
        tried = high
        while low <= high:  # what holds for a run holds for a part of it
            try:
                best, low = layers_of(facts, units[first:tried]), tried + 1
            except Parallel:
                return found
            except Different as reason:
                why, high = why or str(reason), tried - 1
            tried = (low + high) // 2
        if best is None or best.count < min(3, len(units)):  # any two of many may go together by chance
            first += 1
            continue
        found.append(best)
        first += best.count
    left = len(units) - sum(layers.count for layers in found)
    if left:
        name = scopes_name([scopes_of(eqn) for eqn in facts.eqns[units[0][0] : units[0][1]]])
        at = f" from {name} on" if name else ""
        number = f"{left} of {len(units)}" if found else str(left)
        verb = "stays" if left == 1 else "stay"
        refused.append(f"{number} like layers{at} {verb} unrolled: {why}.")
    return found


# -- running ------------------------------------------------------------------------------------------


def run(plan: Plan, consts, *args) -> list:
    """The outputs of the plan's program. Equations run as JAX itself runs them: with their scopes and source lines."""
    facts = plan.facts
    env = dict(zip((*facts.jaxpr.constvars, *facts.jaxpr.invars), (*consts, *args), strict=True))
    read, at = reader(env), 0
    arrays = {
        found.array
        for item in plan.items
        if isinstance(item, Layers)
        for _, atoms in item.stacked
        if (found := array_of(facts, atoms)) is not None
    }
    for item in (*plan.items, None):
        end = len(facts.eqns) if item is None else item.start
        plain = range(at, end)
        if plain:
            inputs, outputs = facts.inputs(plain), facts.outputs(plain)
            outputs += [v for i in plain for v in facts.eqns[i].outvars if v in arrays and v not in outputs]
            fn = function_of([facts.eqns[i] for i in plain], inputs, outputs)
            env.update(zip(outputs, fn(*map(read, inputs)), strict=True))
        if isinstance(item, Layers):
            run_layers(facts, item, env)
        elif isinstance(item, Bodies):
            eqn = facts.eqns[item.start]
            pairs = zip(item.plans, programs_of(eqn), strict=True)
            functions = [functools.partial(run, plan, consts) for plan, (_, consts) in pairs]
            env.update(zip(eqn.outvars, run_with_bodies(eqn, functions, list(map(read, eqn.invars))), strict=True))
        at = end if item is None else item.stop
    return [read(v) for v in facts.jaxpr.outvars]
