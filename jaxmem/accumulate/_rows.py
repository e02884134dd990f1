"""Which losses are sums over the rows of their batch: followed through the program, operation by operation.

A program is looked at beside the one that the same loss makes of half as many rows: what differs in numbers between
the two is a count of rows.
"""

import math
from typing import Any

import jax
import numpy as np

from jaxmem._compat import called_jaxprs, prevents_cse, scan_layout
from jaxmem.accumulate._alignment import (
    Alignment,
    all_joined,
    clean,
    joined,
    joined_sum,
    rows,
    stacked,
    together,
    unknown,
    without,
    worst,
)
from jaxmem.accumulate._row_products import ProductRules
from jaxmem.accumulate._row_shapes import ShapeRules, rank

_SAME = frozenset(
    """
    convert_element_type copy copy_p name neg optimization_barrier pcast pvary reduce_precision sharding_constraint
    stop_gradient
    """.split()
)
_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp cos cosh digamma div eq erf erf_inv erfc
    exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max min mul ne nextafter not
    one_minus_square or population_count pow real imag rem round rsqrt select_n shift_left shift_right_arithmetic
    shift_right_logical sign sin sinh sqrt square sub tan tanh xor
    """.split()
)
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
_ALONG = frozenset("cumsum cumprod cummax cummin cumlogsumexp sort top_k".split())
_CALLS = frozenset(
    "jit pjit eval_jaxpr closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split()
)
_TURNS = 6


class Follower(ShapeRules, ProductRules):
    """Follows rows through two programs of the same loss, of which one has `ratio` times the rows of the other."""

    def __init__(self, ratio: int):
        self.ratio = ratio

    def outputs(self, one: Any, other: Any, given: list[Alignment]) -> list[Alignment]:
        """Of the outputs of a jaxpr whose inputs are `given`; `other` is the jaxpr of fewer rows."""
        known = dict(zip(one.invars, given, strict=True))
        known |= {var: clean() for var in one.constvars}
        if len(one.eqns) != len(other.eqns):
            return [unknown("a program that depends on the number of rows")] * len(one.outvars)
        for eqn, twin in zip(one.eqns, other.eqns, strict=True):
            values = [self._read(known, a, b) for a, b in zip(eqn.invars, twin.invars, strict=False)]
            if eqn.primitive.name != twin.primitive.name or len(eqn.invars) != len(twin.invars):
                found = [unknown("a program that depends on the number of rows")] * len(eqn.outvars)
            else:
                found = self._equation(eqn, twin, values)
                found = [self._placed(*out) for out in zip(found, eqn.outvars, twin.outvars, strict=True)]
            known.update(zip(eqn.outvars, found, strict=True))
        return [self._read(known, a, b) for a, b in zip(one.outvars, other.outvars, strict=True)]

    def _placed(self, value: Alignment, var: Any, twin: Any) -> Alignment:
        """What is of no row but numbers the rows, as an iota does, comes to something else for fewer of them."""
        if value.kind != "clean":
            return value
        sizes = zip(getattr(var.aval, "shape", ()), getattr(twin.aval, "shape", ()), strict=True)
        numbers = any(mine != theirs and axis not in value.constant for axis, (mine, theirs) in enumerate(sizes))
        return unknown("what depends on the place of a row in the batch") if numbers else value

    def _read(self, known: dict, atom: Any, twin: Any) -> Alignment:
        if not hasattr(atom, "val"):
            return known[atom]
        if np.ndim(atom.val) or not np.issubdtype(np.asarray(atom.val).dtype, np.number):
            return clean()
        mine, theirs = float(np.real(atom.val)), float(np.real(twin.val))
        if math.isnan(mine) and math.isnan(theirs):
            return clean()
        for degree in (0, 1, -1):
            if math.isclose(mine, theirs * float(self.ratio) ** degree, rel_tol=1e-6) or mine == theirs:
                return clean(zero=mine == 0, degree=0 if mine == theirs else degree)
        return unknown("a number that depends on the number of rows in its own way")

    def _equation(self, eqn: Any, twin: Any, values: list[Alignment]) -> list[Alignment]:
        name = eqn.primitive.name
        if name in ("scan", "while", "cond"):
            return getattr(self, f"_{name}")(eqn, twin, values)
        inner, theirs = called_jaxprs(eqn), called_jaxprs(twin)
        if (name in _CALLS or prevents_cse(eqn) is not None) and len(inner) == len(theirs) == 1:
            return self.outputs(inner[0], theirs[0], values)
        bad = worst(values)
        if bad is not None:
            return [bad] * len(eqn.outvars)
        rule = getattr(self, f"_{name}", None)
        if name in _SAME and len(values) == len(eqn.outvars):
            whole = [np.issubdtype(atom.aval.dtype, np.integer) for atom in (eqn.invars[0], eqn.outvars[0])]
            if values[0].kind == "sum" and whole == [False, True]:
                return [unknown("a sum over rows that is rounded")]
            return values
        if rule is None and name in _ELEMENTWISE:
            rule = self._elementwise
        elif rule is None and name in _REDUCTIONS:
            rule = self._reduce
        elif rule is None and name in _ALONG:
            rule = self._along
        if rule is None:
            if all(value.kind == "clean" and value.degree == 0 for value in values):
                return [clean()] * len(eqn.outvars)
            return [unknown(f"what {name} does to rows is not known here")] * len(eqn.outvars)
        found = rule(eqn, twin, values)
        return found if isinstance(found, list) else [found] * len(eqn.outvars)

    # -- arithmetic --------------------------------------------------------------------------------

    def _elementwise(self, eqn, twin, values):
        name = eqn.primitive.name
        if eqn.params != twin.params:  # such as a power
            return unknown(f"{name} with a number of rows")
        kinds = {value.kind for value in values}
        if "rows" not in kinds and len(values) == 2:
            left, right = values
            if name in ("mul", "div") and {"sum", "clean"} >= kinds:
                ranks = [rank(atom) for atom in eqn.invars]
                return self._product(left, right, ranks, divided=name == "div")
            if name in ("add", "sub", "add_any") and "sum" in kinds:
                if right.kind == "clean" and right.zero:
                    return left
                return joined_sum(left, right)
        if name == "select_n" and "rows" not in kinds and values[0].kind == "clean" and "sum" in kinds:
            return all_joined(values[1:])
        return together(values, [rank(atom) for atom in eqn.invars], name)

    def _iota(self, eqn, twin, values):
        return clean(set(range(rank(eqn.outvars[0]))) - {eqn.params["dimension"]})

    # -- control flow ------------------------------------------------------------------------------

    def _scan(self, eqn, twin, values):
        params = eqn.params
        consts, carry, _ = scan_layout(eqn)
        body, theirs = called_jaxprs(eqn)[0], called_jaxprs(twin)[0]
        if params["length"] != twin.params["length"]:
            return [unknown("a scan over rows")] * len(eqn.outvars)
        sliced = [
            unknown("a scan over rows") if value.kind == "rows" and value.axis == 0 else without(value, [0])
            for value in values[consts + carry :]
        ]
        state = values[consts : consts + carry]
        for _ in range(_TURNS):
            out = self.outputs(body, theirs, [*values[:consts], *state, *sliced])
            new = [joined(old, now) for old, now in zip(state, out[:carry], strict=True)]
            if new == state:
                return state + [stacked(value) for value in out[carry:]]
            state = new
        return [unknown("a loop whose carry does not settle")] * len(eqn.outvars)

    def _while(self, eqn, twin, values):
        params = eqn.params
        tested, consts = params["cond_nconsts"], params["body_nconsts"]
        test, body = (params[name].jaxpr for name in ("cond_jaxpr", "body_jaxpr"))
        their_test, theirs = (twin.params[name].jaxpr for name in ("cond_jaxpr", "body_jaxpr"))
        state = values[tested + consts :]
        for _ in range(_TURNS):
            (again,) = self.outputs(test, their_test, [*values[:tested], *state])
            if again.kind != "clean":
                return [unknown("a loop as long as rows have it")] * len(eqn.outvars)
            out = self.outputs(body, theirs, [*values[tested : tested + consts], *state])
            new = [joined(old, now) for old, now in zip(state, out, strict=True)]
            if new == state:
                return state
            state = new
        return [unknown("a loop whose carry does not settle")] * len(eqn.outvars)

    def _cond(self, eqn, twin, values):
        if values[0].kind != "clean":
            return [unknown("a conditional that rows decide")] * len(eqn.outvars)
        branches = zip(called_jaxprs(eqn), called_jaxprs(twin), strict=True)
        found = [self.outputs(one, other, values[1:]) for one, other in branches]
        return [all_joined(list(outs)) for outs in zip(*found, strict=True)]


def batch_alignments(batch: Any, axes: tuple[int | None, ...]) -> list[Alignment]:
    """Of the leaves of a batch, in order; None leaves have none."""
    leaves = jax.tree.leaves(batch, is_leaf=lambda x: x is None)
    pairs = zip(leaves, axes, strict=True)
    return [clean() if axis is None else rows(axis) for leaf, axis in pairs if leaf is not None]
