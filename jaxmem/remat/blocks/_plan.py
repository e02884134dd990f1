"""What is found: intervals of equations that become blocks, and equations whose bodies hold blocks."""

import dataclasses
from collections.abc import Iterator
from typing import NamedTuple

from jaxmem._compat import effect_names, scan_layout
from jaxmem.jaxprs import CHEAP, Facts, is_value, num_bytes
from jaxmem.remat.blocks._names import part_names

# What may happen again when a block is recomputed. Everything else (host callbacks, writes to references) must not.
_REPEATABLE = frozenset({"NamedAxisEffect", "DebugEffect", "OrderedDebugEffect"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Interval:
    """Equations `[start, stop)` of which each of `parts` is one block; the rest runs after them.

    An interval of a topological order is convex: nothing that its equations need depends on them. So are unions of
    its connected components. The rest are effects that should happen once, such as `jax.debug.print`.
    """

    kind: str  # "scan", "module" or "structure"
    name: str
    start: int
    stop: int
    parts: tuple[tuple[int, ...], ...]

    @property
    def named_parts(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, equations) of each block."""
        return list(zip(part_names(self.name, len(self.parts)), self.parts, strict=True))

    @property
    def rest(self) -> list[int]:
        taken = {i for part in self.parts for i in part}
        return [i for i in range(self.start, self.stop) if i not in taken]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inside:
    """The equation at `start`, with one plan (or None) for each of its bodies."""

    start: int
    plans: "tuple[Plan | None, ...]"

    @property
    def stop(self) -> int:
        return self.start + 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """One jaxpr and what is marked in it, in the order of its equations."""

    facts: Facts
    items: tuple[Interval | Inside, ...]


class Part(NamedTuple):
    """One block of a plan, at whatever depth.

    Args:
      facts: of the jaxpr that it lies in.
      kind, name: of the block.
      equations: indices.
      times: how often it runs: the lengths of the scans round it, multiplied.
      local: whether it lies in a `shard_map`, so that its shapes are one device's.
    """

    facts: Facts
    kind: str
    name: str
    equations: tuple[int, ...]
    times: int
    local: bool

    @property
    def run(self) -> list[int]:
        """The equations that run: those of the block, and those that make its inputs from arguments of the loss."""
        return with_cheap_inputs(self.facts, self.equations)

    @property
    def free(self) -> tuple[bool, ...]:
        """Per input, whether it is there anyway."""
        return tuple(v in self.facts.free for v in self.facts.inputs(self.run))


def parts(plan: Plan, times: int = 1, local: bool = False) -> Iterator[Part]:
    """The blocks of a plan and of the bodies in it."""
    for item in plan.items:
        if isinstance(item, Interval):
            for name, part in item.named_parts:
                yield Part(plan.facts, item.kind, name, part, times, local)
            continue
        eqn = plan.facts.eqns[item.start]
        runs = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for inner in filter(None, item.plans):
            yield from parts(inner, times * runs, local or eqn.primitive.name == "shard_map")


class Bytes(NamedTuple):
    """What marking costs and frees; modelled.

    Args:
      kept: bytes at the entries of blocks.
      freed: bytes inside blocks.
      again: the largest block's share of `freed`, alive while it is recomputed.
    """

    kept: int
    freed: int
    again: int


def interval(facts: Facts, kind: str, name: str, start: int, stop: int, *, split: bool = True) -> Interval | None:
    """The block or blocks of an interval, one for each tower in it; None where an effect forbids recomputation.

    Args:
      split: make a block of each connected component with heavy work; otherwise the interval is one block.
    """
    inside = []
    for i in range(start, stop):
        effects = effect_names(facts.eqns[i])
        read = any(start <= reader < stop for v in facts.eqns[i].outvars for reader in facts.read_at.get(v, ()))
        if not effects or (read and effects <= _REPEATABLE) or effects <= {"NamedAxisEffect"}:
            inside.append(i)
        elif read:
            return None
    parts = _towers(facts, inside) if split else [tuple(inside)]
    if not inside:
        return None
    return Interval(kind=kind, name=name, start=start, stop=stop, parts=tuple(parts))


def _towers(facts: Facts, indices: list[int]) -> list[tuple[int, ...]]:
    """Components that share no value made here. Those without heavy work join the first that has some."""
    parent = {i: i for i in indices}

    def root(i):
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    for i in indices:
        for v in facts.eqns[i].invars:
            if is_value(v) and facts.made_at.get(v, -1) in parent:
                a, b = sorted((root(i), root(facts.made_at[v])))
                parent[b] = a
    towers = {}
    for i in indices:
        towers.setdefault(root(i), []).append(i)
    heavy = [tower for tower in towers.values() if any(facts.heavy[i] for i in tower)]
    if len(heavy) < 2:
        return [tuple(indices)]
    light = [i for tower in towers.values() if tower not in heavy for i in tower]
    heavy[0] = sorted(heavy[0] + light)
    return [tuple(tower) for tower in heavy]


def with_cheap_inputs(facts: Facts, part: tuple[int, ...]) -> list[int]:
    """The equations of a block, and those that make its inputs from arguments of the loss, e.g. by a cast.

    Then the arguments are kept, which are there anyway, and not the copies.
    """
    chosen, seen, waiting = set(part), set(), facts.inputs(part)
    while waiting:
        v = waiting.pop()
        i = facts.made_at.get(v)
        if i is None or i in seen or v not in facts.free:
            continue
        seen.add(i)
        if facts.eqns[i].primitive.name in CHEAP:
            chosen.add(i)
            waiting += [u for u in facts.eqns[i].invars if is_value(u)]
    return sorted(chosen)


def bytes_of(facts: Facts, items) -> Bytes:
    """Modelled bytes of all the blocks of `items`."""
    found = list(parts(Plan(facts=facts, items=tuple(items))))
    kept = sum(part.times * part.facts.boundary_bytes(part.equations) for part in found)
    inside = [part.facts.inside_bytes(part.equations) for part in found]
    freed = sum(part.times * size for part, size in zip(found, inside, strict=True))
    return Bytes(kept, freed, max(inside, default=0))


def carry_bytes(eqn) -> int:
    """Bytes of the carry of a scan equation."""
    num_consts, num_carry, _ = scan_layout(eqn)
    return sum(num_bytes(v.aval) for v in eqn.invars[num_consts : num_consts + num_carry])


def scanned_block(eqn, item: Inside) -> str | None:
    """The name of the block that is the whole body of a scan of several steps; None where there is none."""
    if eqn.primitive.name != "scan" or eqn.params["length"] < 2 or item.plans[0] is None:
        return None
    inner = item.plans[0].items
    if len(inner) != 1 or not isinstance(inner[0], Interval) or inner[0].kind != "scan" or len(inner[0].parts) != 1:
        return None
    return inner[0].name


def scan_lengths(plan: Plan) -> dict[str, int]:
    """Lengths of the outermost scans of several steps, by the name of the block that is their body."""
    found = {}
    for item in plan.items:
        if isinstance(item, Inside):
            eqn = plan.facts.eqns[item.start]
            name = scanned_block(eqn, item)
            if name is not None:
                found[name] = eqn.params["length"]
    return found
