"""Abstract evaluation of a program: how each of its values depends on the rows of the batch.

A program is evaluated beside its twin, the program of the same function on fewer rows. An axis is *long*, and a number
counts rows, where the two differ by the ratio of the rows. Invariant: along a long axis other than that of its rows a
value is constant.
"""

from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmem._compat import called_programs, prevents_cse, scan_layout
from jaxmem.accumulate._shards import is_key
from jaxmem.accumulate.separability._row_values import CLEAN, Value, join, long_axes, shift_axis, unknown, worst

_CALLS = frozenset("jit pjit eval_jaxpr closed_call core_call custom_jvp_call custom_vjp_call".split())
_SIZES = frozenset("shape new_sizes slice_sizes start_indices limit_indices sizes padding_config".split())
_KEEPS_LARGEST = frozenset("convert_element_type copy reshape squeeze slice broadcast_in_dim reduce_max".split())
_NONLINEAR = frozenset("cholesky eig eigh lu qr schur svd householder_product tridiagonal".split())
_MAX_TURNS = 6


class RowInterpreter:
    """Evaluates two programs of one function, on a batch and on a batch with `ratio` times fewer rows.

    Args:
      rules: name of a primitive -> `rule(eqn, twin, values)`, which returns one value for all outputs, or a list.
    """

    def __init__(self, ratio: int, rules: dict):
        self.ratio, self.rules = ratio, rules

    def outputs(self, whole: jex.ClosedJaxpr, part: jex.ClosedJaxpr, given: list[Value]) -> list[Value]:
        """The outputs of the program `whole` on inputs `given`; `part` is its twin."""
        return self._run((whole.jaxpr, whole.consts), (part.jaxpr, part.consts), given)

    def _run(self, whole, part, given: list[Value]) -> list[Value]:
        (jaxpr, consts), (their_jaxpr, theirs) = whole, part
        (eqns, outs), (twins, their_outs) = _without_shardings(jaxpr), _without_shardings(their_jaxpr)
        alike = [_form(*eqn) for eqn in eqns] == [_form(*twin) for twin in twins]
        alike &= len(jaxpr.invars) == len(their_jaxpr.invars) and len(outs) == len(their_outs)
        if not alike or not len(consts) == len(theirs) == len(jaxpr.constvars):
            return [unknown("a program that depends on the number of rows")] * len(jaxpr.outvars)
        known: dict = {}  # (variable, its twin) -> value

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
        if isinstance(mine, Tracer) or is_key(mine) or (mine is theirs and np.shape(mine)):
            return CLEAN.with_(uniform=not np.shape(mine))
        mine, theirs = (np.asarray(value) for value in (mine, theirs))
        wide = np.complex128 if np.iscomplexobj(mine) else np.float64
        mine, theirs = mine.astype(wide), theirs.astype(wide)
        for degree in (0, 1, -1):
            rtol = 1e-6 if degree else 0.0  # a count may have been rounded
            if np.allclose(mine, theirs * float(self.ratio) ** degree, rtol=rtol, atol=0, equal_nan=True):
                return CLEAN.with_(degree=degree, uniform=not mine.shape, zero=not mine.any())
        return unknown("a number that depends on the number of rows in its own way")

    def _equation(self, eqn: Any, twin: Any, values: list[Value]) -> Any:
        name = eqn.primitive.name
        inner, theirs = called_programs(eqn), called_programs(twin)
        if name == "watch_names":  # the results of a loss under `remat.apply`, as they are
            return values
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, twin, values, inner, theirs)
        if (name in _CALLS or prevents_cse(eqn) is not None) and len(inner) == len(theirs) == 1:
            return self._run(inner[0], theirs[0], values)
        if [value.kind for value in values] == ["largest"] and name in _KEEPS_LARGEST and _keeps_order(eqn):
            return values
        bad = worst(values)
        if bad and (name != "sort" or bad.kind == "mixed"):  # its derivative also sorts the indices, which are unknown
            return bad
        if name not in self.rules and any(value.kind != "clean" or value.degree for value in values):
            of_sum = name in _NONLINEAR and values[0].kind == "sum"
            return unknown(f"what {name} does to rows is not known here", of_sum=of_sum)
        params = [{key: value for key, value in e.params.items() if not _is_about_sizes(key)} for e in (eqn, twin)]
        if repr(params[0]) != repr(params[1]):  # by repr, since a fill value of NaN is not equal to itself
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
            unknown("a scan over rows") if value.kind == "rows" and value.axis == 0 else shift_axis(value, -1)
            for value in values[consts + carry :]
        ]
        state = values[consts : consts + carry]
        for _ in range(_MAX_TURNS):
            out = self._run(inner[0], theirs[0], [*values[:consts], *state, *sliced])
            new = [join([old, now], "a loop") for old, now in zip(state, out[:carry], strict=True)]
            if new == state:
                return state + [shift_axis(value, 1) for value in out[carry:]]
            state = new
        return unknown("a loop whose carry does not settle")

    def _while(self, eqn, twin, values, inner, theirs):
        tested, consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        (test, body), (their_test, their_body) = (
            [(e.params[name].jaxpr, e.params[name].consts) for name in ("cond_jaxpr", "body_jaxpr")]
            for e in (eqn, twin)
        )
        state = values[tested + consts :]
        for _ in range(_MAX_TURNS):
            (again,) = self._run(test, their_test, [*values[:tested], *state])
            if again.kind != "clean":
                return unknown("a loop whose length depends on rows", of_sum=again.kind == "sum" or again.of_sum)
            out = self._run(body, their_body, [*values[tested : tested + consts], *state])
            new = [join([old, now], "a loop") for old, now in zip(state, out, strict=True)]
            if new == state:
                return state
            state = new
        return unknown("a loop whose carry does not settle")

    def _cond(self, eqn, twin, values, inner, theirs):
        if values[0].kind != "clean" or values[0].degree:
            of_sum = values[0].kind == "sum" or values[0].of_sum
            return unknown("a conditional that rows decide", of_sum=of_sum)
        found = [self._run(*pair, values[1:]) for pair in zip(inner, theirs, strict=True)]
        return [join(list(outs), "a conditional") for outs in zip(*found, strict=True)]


def _form(eqn: Any, atoms: list) -> tuple:
    return eqn.primitive.name, len(atoms), len(eqn.outvars)


def _keeps_order(eqn: Any) -> bool:
    """Whether an operation is monotonic: a cast to a narrower integer dtype is not."""
    before, after = (atom.aval.dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    return jnp.promote_types(before, after) == after or jnp.issubdtype(after, jnp.floating)


def _without_shardings(jaxpr: jex.Jaxpr) -> tuple[list, list]:
    """(equation, operands) pairs and outputs of a program, without the equations that only place values on a mesh.

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


def _is_about_sizes(parameter: str) -> bool:
    """Whether a parameter holds sizes, which the rules compare, or a sharding, or a program."""
    return parameter in _SIZES or "sharding" in parameter or "jaxpr" in parameter
