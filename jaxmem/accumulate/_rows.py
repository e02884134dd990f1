"""How the values of a program depend on the rows of its batch: followed operation by operation.

A program is looked at beside the one that the same function makes of fewer rows: an axis is *long*, and a number
counts rows, where the two differ by the ratio of the rows. Invariant: along a long axis other than that of its rows a
value is the same everywhere.
"""

import dataclasses
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmem._compat import called_programs, prevents_cse, scan_layout
from jaxmem.accumulate._shards import is_key

_CALLS = frozenset("jit pjit eval_jaxpr closed_call core_call".split())
_OF_SHAPES = frozenset("shape new_sizes slice_sizes start_indices limit_indices sizes padding_config".split())
_TURNS = 6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """What is known of one value of a program.

    Args:
      kind: "clean", no row in it; "rows", along `axis` each index belongs to one row and depends on that only; "sum",
        a sum over rows of what depends on one each; "largest", a maximum likewise; "mixed", something of one row and
        of others; "unknown".
      axis: of "rows".
      inner: of "rows": how many neighbours along `axis` belong to the same row.
      degree: of "clean" and "sum": the power of the number of rows n by which its factors grow, 1 for `x.size` and -1
        for the factor in a mean. To a sum of degree d what is clean of degree d + 1 may be added.
      uniform: of "clean": whether all elements are the same.
      zero: of "clean": whether all are zero.
      of_sum: of "unknown": whether it comes of a sum over rows, in which it is not linear.
      why: of "largest", "mixed" and "unknown".
    """

    kind: str
    axis: int = -1
    inner: int = 1
    degree: int = 0
    uniform: bool = False
    zero: bool = False
    of_sum: bool = False
    why: str = ""

    def with_(self, **fields: Any) -> "Value":
        return dataclasses.replace(self, **fields)

    @property
    def grown(self) -> int:
        """The power of n by which it grows if all rows are alike: two parts add up to the whole where that is 1."""
        return self.degree + (self.kind == "sum")


CLEAN, UNIFORM, SUM = Value(kind="clean"), Value(kind="clean", uniform=True), Value(kind="sum")


def rows(axis: int, inner: int = 1) -> Value:
    return Value(kind="rows", axis=axis, inner=inner)


def unknown(why: str, *, of_sum: bool = False) -> Value:
    return Value(kind="unknown", why=why, of_sum=of_sum)


def mixed(why: str) -> Value:
    return Value(kind="mixed", why=why)


def worst(values: list[Value]) -> Value | None:
    """The first that is mixed, else unknown; None where all are better."""
    bad = [value for value in values if value.kind in ("mixed", "largest", "unknown")]
    bad = sorted(bad, key=lambda value: (value.kind == "unknown", not value.of_sum))
    return bad[0].with_(kind="unknown" if bad[0].kind == "unknown" else "mixed") if bad else None


def together(values: list[Value], what: str) -> Value:
    """Of an operation on each element, or each row, of operands of which some are rows."""
    if any(value.kind == "sum" for value in values):
        return mixed(f"{what} of a row with a sum over rows")
    own = {(value.axis, value.inner) for value in values if value.kind == "rows"}
    if len(own) > 1:
        return mixed(f"{what} of one row with another")
    if any(value.degree for value in values):
        return unknown(f"{what} of a row with a number of rows")
    return rows(*own.pop())


def added(values: list[Value], what: str) -> Value:
    """Of the sum of values without rows, or of one of them."""
    values = [value for value in values if not value.zero] or values[:1]
    if len({value.grown for value in values}) > 1:
        return unknown(f"{what} of what grows with the rows and what does not")
    if any(value.kind == "sum" for value in values):
        return SUM.with_(degree=values[0].grown - 1)
    return values[0].with_(uniform=all(value.uniform for value in values))


def either(values: list[Value], what: str) -> Value:
    """Any of several: the branches of a conditional, or the turns of a loop."""
    if len(set(values)) == 1:
        return values[0]
    return worst(values) or (together if any(v.kind == "rows" for v in values) else added)(values, what)


def moved(value: Value, by: int) -> Value:
    """Of the value with as many more first axes."""
    return value.with_(axis=value.axis + by) if value.kind == "rows" else value


def rank(atom: Any) -> int:
    """Number of dimensions."""
    return len(getattr(atom.aval, "shape", ()))


def long_axes(atom: Any, twin: Any) -> set[int]:
    """The axes whose sizes differ."""
    sizes = zip(getattr(atom.aval, "shape", ()), getattr(twin.aval, "shape", ()), strict=True)
    return {axis for axis, (mine, theirs) in enumerate(sizes) if mine != theirs}


class Follower:
    """Follows rows through two programs of the same function, of which one has `ratio` times the rows of the other.

    Args:
      rules: name of a primitive -> what becomes of values, `rule(eqn, twin, values)`, one value or one an output.
    """

    def __init__(self, ratio: int, rules: dict):
        self.ratio, self.rules = ratio, rules

    def outputs(self, one: jex.ClosedJaxpr, other: jex.ClosedJaxpr, given: list[Value]) -> list[Value]:
        """Of the outputs of a program whose inputs are `given`; `other` is the program of fewer rows."""
        return self._run((one.jaxpr, one.consts), (other.jaxpr, other.consts), given)

    def _run(self, one, other, given: list[Value]) -> list[Value]:
        (jaxpr, consts), (their_jaxpr, theirs) = one, other
        (eqns, outs), (twins, their_outs) = _placed_anyhow(jaxpr), _placed_anyhow(their_jaxpr)
        alike = [_form(*eqn) for eqn in eqns] == [_form(*twin) for twin in twins]
        alike &= len(jaxpr.invars) == len(their_jaxpr.invars) and len(outs) == len(their_outs)
        if not alike or not len(consts) == len(theirs) == len(jaxpr.constvars):
            return [unknown("a program that depends on the number of rows")] * len(jaxpr.outvars)
        known: dict = {}  # of both programs' variables

        def learn(variables, their_variables, values):
            known.update(zip(zip(variables, their_variables, strict=True), values, strict=True))

        def read(*atoms):
            literal = [isinstance(atom, jex.Literal) for atom in atoms]
            if all(literal):
                return self._constant(*[atom.val for atom in atoms])
            found = None if any(literal) else known.get(atoms)
            return unknown("a program that depends on the number of rows") if found is None else found

        learn(jaxpr.invars, their_jaxpr.invars, given)
        learn(jaxpr.constvars, their_jaxpr.constvars, map(self._constant, consts, theirs))
        for (eqn, atoms), (twin, their_atoms) in zip(eqns, twins, strict=True):
            found = self._equation(eqn, twin, list(map(read, atoms, their_atoms)))
            found = found if isinstance(found, list) else [found] * len(eqn.outvars)
            learn(eqn.outvars, twin.outvars, found)
        return list(map(read, outs, their_outs))

    def _constant(self, mine: Any, theirs: Any) -> Value:
        if np.shape(mine) != np.shape(theirs):
            return unknown("a constant of as many numbers as there are rows")
        if mine is theirs or isinstance(mine, Tracer) or is_key(mine):
            return CLEAN.with_(uniform=not np.shape(mine))
        mine, theirs = (np.asarray(value) for value in (mine, theirs))
        wide = np.complex128 if np.iscomplexobj(mine) else np.float64
        mine, theirs = mine.astype(wide), theirs.astype(wide)
        for degree in (0, 1, -1):
            rtol = 1e-6 if degree else 0.0  # a count may be rounded
            if np.allclose(mine, theirs * float(self.ratio) ** degree, rtol=rtol, atol=0, equal_nan=True):
                return CLEAN.with_(degree=degree, uniform=not mine.shape, zero=not mine.any())
        return unknown("a number that depends on the number of rows in its own way")

    def _equation(self, eqn: Any, twin: Any, values: list[Value]) -> Any:
        name = eqn.primitive.name
        inner, theirs = called_programs(eqn), called_programs(twin)
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, twin, values, inner, theirs)
        if (name in _CALLS or prevents_cse(eqn) is not None) and len(inner) == len(theirs) == 1:
            return self._run(inner[0], theirs[0], values)
        if [value.kind for value in values] == ["largest"] and name in _KEEPS_LARGEST and _keeps_order(eqn):
            return values
        bad = worst(values)
        if bad and (name != "sort" or bad.kind == "mixed"):  # it is differentiated beside the places in the batch
            return bad
        if name not in self.rules and any(value.kind != "clean" or value.degree for value in values):
            return unknown(f"what {name} does to rows is not known here")
        params = [{key: value for key, value in e.params.items() if not _of_shapes(key)} for e in (eqn, twin)]
        if repr(params[0]) != repr(params[1]):  # NaN, which fills, equals nothing
            return unknown(f"{name} with a number of rows")
        if name in self.rules:
            return self.rules[name](eqn, twin, values)
        if any(long_axes(*pair) for pair in zip(eqn.outvars, twin.outvars, strict=True)):
            return unknown("what depends on the place of a row in the batch")
        return CLEAN

    # -- control flow ------------------------------------------------------------------------------

    def _scan(self, eqn, twin, values, inner, theirs):
        consts, carry, _ = scan_layout(eqn)
        if eqn.params["length"] != twin.params["length"]:
            return unknown("a scan over rows")
        sliced = [
            unknown("a scan over rows") if value.kind == "rows" and value.axis == 0 else moved(value, -1)
            for value in values[consts + carry :]
        ]
        state = values[consts : consts + carry]
        for _ in range(_TURNS):
            out = self._run(inner[0], theirs[0], [*values[:consts], *state, *sliced])
            new = [either([old, now], "a loop") for old, now in zip(state, out[:carry], strict=True)]
            if new == state:
                return state + [moved(value, 1) for value in out[carry:]]
            state = new
        return unknown("a loop whose carry does not settle")

    def _while(self, eqn, twin, values, inner, theirs):
        tested, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        (test, body), (their_test, their_body) = (
            [(e.params[name].jaxpr, e.params[name].consts) for name in ("cond_jaxpr", "body_jaxpr")]
            for e in (eqn, twin)
        )
        state = values[tested + consts :]
        for _ in range(_TURNS):
            (again,) = self._run(test, their_test, [*values[:tested], *state])
            if again.kind != "clean":
                return unknown("a loop as long as rows have it")
            out = self._run(body, their_body, [*values[tested : tested + consts], *state])
            new = [either([old, now], "a loop") for old, now in zip(state, out, strict=True)]
            if new == state:
                return state
            state = new
        return unknown("a loop whose carry does not settle")

    def _cond(self, eqn, twin, values, inner, theirs):
        if values[0].kind != "clean" or values[0].degree:
            return unknown("a conditional that rows decide")
        found = [self._run(*pair, values[1:]) for pair in zip(inner, theirs, strict=True)]
        return [either(list(outs), "a conditional") for outs in zip(*found, strict=True)]


_KEEPS_LARGEST = frozenset("convert_element_type copy reshape squeeze slice broadcast_in_dim reduce_max".split())


def _form(eqn: Any, atoms: list) -> tuple:
    return eqn.primitive.name, len(atoms), len(eqn.outvars)


def _keeps_order(eqn: Any) -> bool:
    """Whether what it makes is in the order of what it is given: a cast to fewer integers is not."""
    before, after = (atom.aval.dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    return jnp.promote_types(before, after) == after or jnp.issubdtype(after, jnp.floating)


def _placed_anyhow(jaxpr: jex.Jaxpr) -> tuple[list, list]:
    """Its equations, each with what it takes, and its outputs, without what says where a value lies.

    On a mesh of explicit axes JAX leaves such equations, and sums over no axis, in one program and not in its twin.
    """
    same, eqns = {}, []
    read = lambda atom: atom if isinstance(atom, jex.Literal) else same.get(atom, atom)  # noqa: E731
    for eqn in jaxpr.eqns:
        atoms = list(map(read, eqn.invars))
        if eqn.primitive.name in ("reshard", "sharding_constraint") or eqn.params.get("axes") == ():
            same[eqn.outvars[0]] = atoms[0]
        else:
            eqns.append((eqn, atoms))
    return eqns, list(map(read, jaxpr.outvars))


def _of_shapes(parameter: str) -> bool:
    """Whether a parameter is about sizes, which rules look at, about places, or a program."""
    return parameter in _OF_SHAPES or "sharding" in parameter or "jaxpr" in parameter
