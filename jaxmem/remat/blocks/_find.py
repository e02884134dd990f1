"""Where the blocks of a jaxpr are: scans first, then repeated modules, then repeated structure."""

import collections
import dataclasses

import jax.extend.core as jex

from jaxmem.jaxprs import (
    USER_CHECKPOINT,
    Facts,
    Tokens,
    bodies,
    body_key,
    nested_segments,
    scopes_of,
    without_checkpoint,
)
from jaxmem.remat.blocks._names import numbered_name, scan_name, scopes_name, stretch_name
from jaxmem.remat.blocks._plan import Inside, Interval, Plan, bytes_of, carry_bytes, interval
from jaxmem.remat.blocks._repeats import Stretch, find_repeat, repeated_modules, stretches_at

# Where repeated things make this share of what the backward pass of a repeated thing needs, that is no block but a
# stage or a tower of blocks.
_CONTAINER_SHARE = 0.9
# A scan without matmuls is a block only from here on: cumulative sums, key splitting and the like are left alone.
_SMALL_SCAN_BYTES = 2**20


def find_plan(closed_jaxpr: jex.ClosedJaxpr) -> Plan | None:
    """A jaxpr with its blocks marked, each under a name of its own; None where there are none."""
    plan = plan_blocks(Facts.of(closed_jaxpr))
    return plan and _with_unique_names(plan, collections.Counter())


def plan_blocks(facts: Facts, *, scans_only: bool = False) -> Plan | None:
    """The blocks of a jaxpr and of the bodies in it; None where there are none.

    Args:
      scans_only: bodies of scans only, as within a checkpoint of the user's own: it is a block already, in which
        a scan would keep values of all its steps at once while the block is recomputed.
    """
    items = _Search(facts, scans_only).cover(0, len(facts.eqns), 0)
    return Plan(facts=facts, items=tuple(items)) if items else None


def _with_unique_names(plan: Plan, counts: collections.Counter) -> Plan:
    items = []
    for item in plan.items:
        if isinstance(item, Interval):
            counts[item.name] += 1
            item = dataclasses.replace(item, name=numbered_name(item.name, counts[item.name]))
        else:
            plans = tuple(inner and _with_unique_names(inner, counts) for inner in item.plans)
            item = dataclasses.replace(item, plans=plans)
        items.append(item)
    return dataclasses.replace(plan, items=tuple(items))


class _Search:
    """One jaxpr being searched."""

    def __init__(self, facts: Facts, scans_only: bool = False):
        self.facts, self.scans_only = facts, scans_only
        self.paths = [scopes_of(eqn) for eqn in facts.eqns]
        self._tokens = {}

    def tokens(self, loose: bool) -> Tokens:
        if loose not in self._tokens:
            self._tokens[loose] = Tokens(self.facts, loose=loose)
        return self._tokens[loose]

    def cover(self, start: int, stop: int, depth: int) -> list:
        """Modules by their scopes; then structure between them; then the bodies of what is left."""
        if self.scans_only:
            return self._inside(start, stop)
        return self._fill(start, stop, self._modules(start, stop, depth), self._structure)

    # -- repeated modules ------------------------------------------------------------------------

    def _modules(self, start: int, stop: int, depth: int) -> list:
        calls = [call for call in stretches_at(self.paths, depth, start, stop) if self._heavy(call.start, call.stop)]
        worth = [call for call in calls if self._worth(call.start, call.stop)]
        groups = repeated_modules(worth)
        again = [] if groups else self._called_again(worth, start, stop)
        items = self._grouped(calls, groups or again, depth)
        if not again:
            return items
        # A library may name its operators alone, as Equinox does: then the calls are parts of the layers.
        layers = self._structure(start, stop)
        whole = self.facts.inside_bytes(range(start, stop))
        filled = self._fill(start, stop, items, self._structure)
        return layers if self._cost(whole, layers) < self._cost(whole, filled) else items

    def _grouped(self, calls: list[Stretch], groups: list[list[Stretch]], depth: int) -> list:
        items, taken = [], set()
        for group in groups:
            items += self._settle("module", self._named(group), depth + 1)
            taken |= {
                call for call in calls if any(unit.start < call.stop and call.start < unit.stop for unit in group)
            }
        for call in calls:
            if call not in taken:
                items += self._modules(call.start, call.stop, depth + 1)
        return sorted(items, key=lambda item: item.start)

    def _called_again(self, calls: list[Stretch], start: int, stop: int) -> list[list[Stretch]]:
        """Modules that are called several times: shared weights, or one encoder on two inputs."""
        names = collections.Counter(call.name for call in calls)
        again = [call for call in calls if names[call.name] > 1]
        if not again:
            return []
        units = find_repeat(self.facts, self.tokens(False), start, stop)
        if units and units[0][0] <= again[0].start and again[-1].stop <= units[-1][1]:
            return [[Stretch(again[0].name, *unit) for unit in units]]
        return [[call for call in again if call.name == name] for name in dict.fromkeys(call.name for call in again)]

    def _named(self, calls: list[Stretch]) -> list[Stretch]:
        """The calls under the scopes that all of their equations share."""
        return [call._replace(name=scopes_name(self.paths[call.start : call.stop])) for call in calls]

    # -- repeated structure ----------------------------------------------------------------------

    def _structure(self, start: int, stop: int) -> list:
        """Repetitions in `[start, stop)`, the one with the most heavy work first, then what lies on both sides."""
        if self.facts.num_heavy(start, stop) < 2:
            return self._inside(start, stop)
        for loose in (False, True):
            units = find_repeat(self.facts, self.tokens(loose), start, stop)
            if units:
                calls = self._named([Stretch("", *unit) for unit in units])
                calls = [c._replace(name=stretch_name(c.name, i, len(calls))) for i, c in enumerate(calls)]
                found = self._settle("structure", calls, None)
                if found:
                    left, right = units[0][0], units[-1][1]
                    return self._structure(start, left) + found + self._structure(right, stop)
        return self._inside(start, stop)

    # -- a group of repeated intervals: blocks, or containers of blocks ---------------------------------

    def _settle(self, kind: str, calls: list[Stretch], depth: int | None) -> list:
        blocks = [interval(self.facts, kind, call.name, call.start, call.stop) for call in calls]
        whole = [self.facts.inside_bytes(range(call.start, call.stop)) for call in calls]
        largest = whole.index(max(whole))

        def inner(call):
            if depth is not None:
                return self.cover(call.start, call.stop, depth)
            return self._smaller_structure(call.start, call.stop)

        if self._is_container(whole[largest], inner(calls[largest])):
            nested = [item for call in calls for item in inner(call)]
            if None in blocks or self._cost(sum(whole), nested) < self._cost(sum(whole), blocks):
                return nested
        return [block for block in blocks if block is not None]

    def _smaller_structure(self, start: int, stop: int) -> list:
        if stop - start == 1:
            return self._inside(start, stop)
        return self._structure(start, stop)

    def _is_container(self, whole: int, items: list) -> bool:
        inner = bytes_of(self.facts, items)
        return bool(items) and inner.kept + inner.freed >= _CONTAINER_SHARE * whole

    def _cost(self, whole: int, items: list) -> int:
        """Modelled peak of full remat: what blocks keep, what is outside of blocks, and the largest one's inside."""
        inner = bytes_of(self.facts, items)
        return inner.kept + max(0, whole - inner.kept - inner.freed) + inner.again

    # -- bodies ----------------------------------------------------------------------------------

    def _fill(self, start: int, stop: int, items: list, search) -> list:
        """`items`, and what `search` finds between them."""
        found, at = [], start
        for item in [*items, None]:
            end = stop if item is None else item.start
            found += search(at, end) if at < end else []
            if item is not None:
                found.append(item)
                at = item.stop
        return found

    def _inside(self, start: int, stop: int) -> list:
        """Blocks in the bodies of single equations: scans, jit, cond, shard_map; scans in the user's checkpoints."""
        items = []
        for i in range(start, stop):
            eqn = self.facts.eqns[i]
            name = eqn.primitive.name
            if not body_key(eqn) or not (self.facts.heavy[i] or name == "scan" or self.facts.holds_segments(eqn)):
                continue
            if name == "scan" and eqn.params["length"] > 1:
                plans = (self._scan_body(i),)
            else:
                scans_only = self.scans_only or name in USER_CHECKPOINT
                each = (self.facts.of_body(eqn, which) for which in range(len(bodies(eqn))))
                plans = tuple(plan_blocks(body, scans_only=scans_only) for body in each)
            if any(plan is not None for plan in plans):
                items.append(Inside(start=i, plans=plans))
        return items

    def _scan_body(self, index: int) -> Plan | None:
        """The whole body as one block, if that frees memory; else the scans in what it recomputes as a whole."""
        eqn = self.facts.eqns[index]
        body = self.facts.of_body(eqn)
        if nested_segments(eqn):  # the wrapper's policy takes the place of the checkpoint in it
            body = without_checkpoint(body)
        everything = range(len(body.eqns))
        inside, length = body.inside_bytes(everything), eqn.params["length"]
        large = inside * length >= _SMALL_SCAN_BYTES and inside >= 2 * carry_bytes(eqn)
        if nested_segments(eqn) or (inside > 0 and (any(body.heavy) or large)):
            block = interval(body, "scan", scan_name(self.paths[index]), 0, len(body.eqns), split=False)
            return None if block is None else Plan(facts=body, items=(block,))
        if any(map(body.holds_segments, body.eqns)):
            return plan_blocks(body, scans_only=True)
        return None

    def _heavy(self, start: int, stop: int) -> bool:
        return self.facts.num_heavy(start, stop) > 0

    def _worth(self, start: int, stop: int) -> bool:
        return self._heavy(start, stop) and self.facts.inside_bytes(range(start, stop)) > 0
