"""Abstract evaluation of a program: how each of its values depends on the rows of the batch.

A program is evaluated beside its twin, the program of the same function on fewer rows. An axis is *long*, and a number
counts rows, where the two differ by the ratio of the rows. Invariant: along a long axis other than that of its rows a
value is constant.
"""

import itertools
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jaxmem._compat import called_programs, prevents_cse, scan_layout
from jaxmem.accumulate._shards import is_key
from jaxmem.accumulate.separability._row_values import CLEAN, Value, join, long_axes, shift_axis, unknown, worst

_CALLS = frozenset("jit pjit eval_jaxpr closed_call core_call custom_jvp_call custom_vjp_call".split())
# Also what hands several values on: results of a loss under `remat.apply`, inputs of a block.
_PLACES = frozenset("reshard sharding_constraint watch_names tie_gradients".split())
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
        mine, its = _Flat(*whole), _Flat(*part)
        if mine.form() != its.form():
            return [unknown("a program that depends on the number of rows")] * len(whole[0].outvars)
        known: dict = {}  # (name, its twin) -> value

        def learn(names, their_names, values):
            known.update(zip(zip(names, their_names, strict=True), values, strict=True))

        def read(*atoms):
            literal = [isinstance(atom, jex.Literal) for atom in atoms]
            if all(literal):
                return self._constant(*[atom.val for atom in atoms])
            found = None if any(literal) else known.get(atoms)
            return unknown("a program that depends on the number of rows") if found is None else found

        learn(mine.inputs, its.inputs, given)
        learn(mine.consts, its.consts, map(self._constant, mine.consts.values(), its.consts.values()))
        for (eqn, atoms, names), (twin, their_atoms, their_names) in zip(mine.eqns, its.eqns, strict=True):
            found = self._equation(eqn, twin, list(map(read, atoms, their_atoms)))
            learn(names, their_names, found if isinstance(found, list) else [found] * len(names))
        return list(map(read, mine.outputs, its.outputs))

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
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, twin, values, called_programs(eqn), called_programs(twin))
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


def _keeps_order(eqn: Any) -> bool:
    """Whether an operation is monotonic: a cast to a narrower integer dtype is not."""
    before, after = (atom.aval.dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    return jnp.promote_types(before, after) == after or jnp.issubdtype(after, jnp.floating)


class _Flat:
    """A program without its calls: what they call stands in their place.

    Programs of one function that differ in their calls only, as a budget's choices may with the number of rows, are
    alike then. Left out, too, are equations that only place values on a mesh: on one of explicit axes JAX leaves them,
    and sums over no axis, in one program and not in its twin.

    Args:
      inputs, outputs: names of variables, or literals.
      consts: name → value.
      eqns: (equation, operands, names of its results).
    """

    def __init__(self, jaxpr: jex.Jaxpr, consts: list):
        self._calls = itertools.count()
        self.consts: dict[tuple, Any] = {}
        self.eqns: list[tuple[Any, list, list]] = []
        self.inputs = [(-1, var) for var in jaxpr.invars]
        self.outputs = self._flatten(jaxpr, consts, self.inputs)

    def form(self) -> tuple:
        """What is equal of two programs that are alike."""
        eqns = [(eqn.primitive.name, len(atoms), len(names)) for eqn, atoms, names in self.eqns]
        return eqns, len(self.inputs), len(self.consts), len(self.outputs)

    def _flatten(self, jaxpr: jex.Jaxpr, consts: list, operands: list) -> list:
        call = next(self._calls)  # JAX keeps one program for all calls of a jitted function
        same = dict(zip(jaxpr.invars, operands, strict=True))
        self.consts.update(((call, var), value) for var, value in zip(jaxpr.constvars, consts, strict=True))
        read = lambda atom: atom if isinstance(atom, jex.Literal) else same.get(atom, (call, atom))  # noqa: E731
        for eqn in jaxpr.eqns:
            name, atoms, inner = eqn.primitive.name, list(map(read, eqn.invars)), called_programs(eqn)
            if name in _PLACES or eqn.params.get("axes") == ():
                same.update(zip(eqn.outvars, atoms, strict=True))
            elif (name in _CALLS or prevents_cse(eqn) is not None) and len(inner) == 1:
                same.update(zip(eqn.outvars, self._flatten(*inner[0], atoms), strict=True))
            else:
                self.eqns.append((eqn, atoms, [(call, var) for var in eqn.outvars]))
        return list(map(read, jaxpr.outvars))


def _is_about_sizes(parameter: str) -> bool:
    """Whether a parameter holds sizes, which the rules compare, or a sharding, or a program."""
    return parameter in _SIZES or "sharding" in parameter or "jaxpr" in parameter
