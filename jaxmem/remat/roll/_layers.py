"""`Layers`: like stretches of equations as the body of a scan, and what goes in and out of it."""

import dataclasses
from typing import Any, NamedTuple

import jax.extend.core as jex

from jaxmem._compat import effect_names
from jaxmem.jaxprs import CHEAP, USER_CHECKPOINT, Facts, is_float, is_value, num_bytes
from jaxmem.remat.roll._same import Different, Parallel, as_one, fresh, same_literal, same_type

# Effects that a scan has once a step, in order.
_EFFECTS = frozenset({"NamedAxisEffect", "DebugEffect", "OrderedDebugEffect"})


class Carry(NamedTuple):
    """What a layer takes from the one before.

    Args:
      var: an input of the body.
      start: what the first layer takes.
      following: the value of the body that the next layer takes.
    """

    var: jex.Var
    start: Any
    following: jex.Var


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layers:
    """Like layers as one.

    Args:
      start, stop: where the equations of the layers are.
      count: number of layers.
      hoisted: equations in `[start, stop)` that run before the scan, layer by layer.
      alias: values of hoisted equations that are the same in all layers, and those of the first layer.
      eqns: of the body.
      shared: inputs of the body, and the values that all layers read.
      carries: what a layer takes from the one before.
      stacked: inputs of the body, and the value of each layer: variables, or numbers.
      results: values of the body, each with those of the layers, that are read outside.
    """

    start: int
    stop: int
    count: int
    hoisted: tuple[int, ...]
    alias: dict[jex.Var, jex.Var]
    eqns: list[jex.JaxprEqn]
    shared: list[tuple[jex.Var, Any]]
    carries: list[Carry]
    stacked: list[tuple[jex.Var, tuple]]
    results: list[tuple[jex.Var, tuple[jex.Var, ...]]]


def layers_of(facts: Facts, units: list[tuple[int, int]]) -> Layers:
    """Like stretches, one behind the other, as the body of a scan.

    Raises:
      Different: they are not alike, or a layer reads what a scan has no more: of a layer before the last.
    """
    return _Columns(facts, units).layers()


class _Columns:
    """The equations of layers, place by place; a column is what all layers have in one place."""

    def __init__(self, facts: Facts, units: list[tuple[int, int]]):
        self.facts, self.units = facts, units
        self.eqns = [[facts.eqns[start + j] for start, _ in units] for j in range(units[0][1] - units[0][0])]
        # Where each layer makes its values: (which equation, which output).
        self.made = [
            {v: (j, k) for j, column in enumerate(self.eqns) for k, v in enumerate(column[i].outvars)}
            for i in range(len(units))
        ]
        self.place = {v: (i, at) for i, made in enumerate(self.made) for v, at in made.items()}
        self.one, self.reason = [], {}
        for j, column in enumerate(self.eqns):
            try:
                self.one.append(as_one(column))
            except Different as why:  # they can still run before the scan
                self.one.append((column[0], []))
                self.reason[j] = str(why)
        self.hoisted = self._hoisted()
        self.alias = self._invariant()

    def atoms(self, j: int) -> list[tuple]:
        """What the equations of a column read, input by input."""
        return list(zip(*(eqn.invars for eqn in self.eqns[j]), strict=True))

    def inside(self, atoms: tuple) -> int | None:
        """The column that makes these values, each layer its own; None where they are from outside of their layers."""
        at = [made.get(a) if is_value(a) else None for made, a in zip(self.made, atoms, strict=True)]
        if at[0] is None or any(other != at[0] for other in at):
            if any(at):
                raise Different("they are wired differently")
            return None
        return at[0][0]

    def given(self, atoms: tuple) -> bool:
        """Whether no layer makes any of these values."""
        return not any(is_value(a) and a in self.place for a in atoms)

    def _hoisted(self) -> set[int]:
        """Columns that need nothing of a layer before, and differ, or are the cast or slice of a weight; with all that
        these need.
        """
        carried, hoisted = set(), set()
        for j in range(len(self.eqns)):
            free = True
            for atoms in self.atoms(j):
                maker = self.inside(atoms)
                if (maker is None and not self.given(atoms)) or maker in carried:
                    carried.add(j)
                free = free and (maker in hoisted if maker is not None else self.given(atoms))
            eqn = self.eqns[j][0]
            if j in self.reason:
                if j in carried or eqn.effects:
                    raise Different(self.reason[j])
                hoisted.add(j)
            elif free and j not in carried and eqn.primitive.name in CHEAP and _narrows(eqn):
                hoisted.add(j)
        for j in sorted(range(len(self.eqns)), reverse=True):
            if j in hoisted:
                makers = {m for atoms in self.atoms(j) if (m := self.inside(atoms)) is not None}
                if any(self.eqns[m][0].effects for m in makers):
                    raise Different(f"{self.eqns[j][0].primitive.name} needs what has an effect")
                hoisted |= makers
        return hoisted

    def _invariant(self) -> dict:
        """Values of hoisted columns that are the same in all layers, by those of the first."""
        alias = {}
        for j in sorted(self.hoisted - set(self.reason)):
            if all(_all_same([alias.get(a, a) if is_value(a) else a for a in atoms]) for atoms in self.atoms(j)):
                first, *others = self.eqns[j]
                alias.update((b, a) for eqn in others for a, b in zip(first.outvars, eqn.outvars, strict=True))
        return alias

    # -- the body ----------------------------------------------------------------------------------

    def layers(self) -> Layers:
        kept = [j for j in range(len(self.eqns)) if j not in self.hoisted]
        effects = {name for j in kept for name in effect_names(self.eqns[j][0])}
        if not effects <= _EFFECTS:
            raise Different(f"they have effects ({', '.join(sorted(effects - _EFFECTS))})")
        shared, stacked, found, waiting, eqns = [], [], {}, [], []

        def outside(atoms) -> jex.Var:
            key = tuple(a if is_value(a) else (str(a.aval), str(a.val)) for a in atoms)
            if key not in found:
                if not all(same_type(atoms[0], a) for a in atoms[1:]):
                    raise Different("the types of what they take from the layer before differ")
                found[key] = var = fresh(atoms[0].aval)
                if any(is_value(a) and a in self.place and self.place[a][1][0] not in self.hoisted for a in atoms):
                    waiting.append((var, atoms))
                elif _all_same(atoms):
                    shared.append((var, atoms[0]))
                else:
                    stacked.append((var, atoms))
            return found[key]

        for j in kept:
            eqn, lifted = self.one[j]
            invars = []
            for atoms in self.atoms(j):
                maker = self.inside(atoms)
                same_number = not any(map(is_value, atoms)) and _all_same(atoms)
                if same_number or (maker is not None and maker not in self.hoisted):
                    invars.append(atoms[0])
                else:
                    invars.append(outside(tuple(self.alias.get(a, a) if is_value(a) else a for a in atoms)))
            stacked += [(var, values) for var, values in lifted]
            if eqn.primitive.name in USER_CHECKPOINT and "prevent_cse" in eqn.params:
                eqn = eqn.replace(params=eqn.params | {"prevent_cse": False})  # a scan needs no barrier
            eqns.append(eqn.replace(invars=[*invars, *(var for var, _ in lifted)]))
        carries = self._carries(waiting, found, outside)
        if not any(
            is_float(c.var.aval) and num_bytes(c.var.aval) > 8 for c in carries
        ):  # a sum joins parallel branches, too
            raise Parallel
        return Layers(
            start=self.units[0][0],
            stop=self.units[-1][1],
            count=len(self.units),
            hoisted=tuple(sorted(start + j for start, _ in self.units for j in self.hoisted)),
            alias=self.alias,
            eqns=eqns,
            shared=shared,
            carries=carries,
            stacked=stacked,
            results=self._results(kept),
        )

    def _carries(self, waiting: list, found: dict, outside) -> list[Carry]:
        """What layers take from the one before: what that made, or what that read itself."""
        carries = []
        for var, atoms in waiting:  # grows meanwhile
            at = [made.get(a) if is_value(a) else None for made, a in zip(self.made, atoms[1:], strict=False)]
            place = at[0]
            if is_value(atoms[0]) and atoms[0] in self.place:
                raise Different("a layer reads what another than the one before makes")
            if place is not None and all(other == place for other in at):
                carries.append(Carry(var, atoms[0], self.eqns[place[0]][0].outvars[place[1]]))
                continue
            before = [key for key in found if all(a is b for a, b in zip(key, atoms[1:], strict=False))]
            if not before or len(atoms) < 3:
                raise Different("a layer reads what another than the one before makes")
            carries.append(Carry(var, atoms[0], found[before[0]]))
        return carries

    def _results(self, kept: list[int]) -> list[tuple[jex.Var, tuple]]:
        stop = self.units[-1][1]
        read = lambda v: v in self.facts.returned or any(at >= stop for at in self.facts.read_at.get(v, ()))  # noqa: E731
        found = []
        for j in kept:
            for outvars in zip(*(eqn.outvars for eqn in self.eqns[j]), strict=True):
                values = tuple(v if read(v) else None for v in outvars)
                found += [(outvars[0], values)] if any(values) else []
        return found


def _all_same(atoms) -> bool:
    first = atoms[0]
    if is_value(first):
        return all(a is first for a in atoms)
    return all(not is_value(a) and same_literal(first, a) for a in atoms[1:])


def _narrows(eqn) -> bool:
    """Whether an equation makes no more bytes than it takes."""
    return sum(num_bytes(v.aval) for v in eqn.outvars) <= sum(num_bytes(v.aval) for v in eqn.invars if is_value(v))
