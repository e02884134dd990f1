"""Which losses are sums over the rows of their batch: followed through the program, operation by operation.

A program is looked at beside the one that the same loss makes of half as many rows: what differs in numbers between
the two is a count of rows.
"""

import math
from typing import Any

import jax
import numpy as np

from jaxmem._compat import called_jaxprs, prevents_cse, scan_layout
from jaxmem.accumulate._alignment import SUM, Alignment, clean, joined, mixed, rows, together, unknown, worst

_SAME = frozenset(
    """
    convert_element_type copy copy_p name neg optimization_barrier pcast pvary reduce_precision sharding_constraint
    stop_gradient
    """.split()
)
_ELEMENTWISE = frozenset(
    """
    abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp cos cosh digamma div eq erf erf_inv erfc
    exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max min mul ne nextafter not or
    population_count pow real imag rem round rsqrt select_n shift_left shift_right_arithmetic shift_right_logical sign
    sin sinh sqrt square sub tan tanh xor
    """.split()
)
_REDUCTIONS = frozenset("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin".split())
_ALONG = frozenset("cumsum cumprod cummax cummin cumlogsumexp sort top_k".split())
_CALLS = frozenset(
    "jit pjit eval_jaxpr closed_call core_call custom_jvp_call custom_vjp_call custom_vjp_call_jaxpr".split()
)
_TURNS = 6


class Follower:
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
            known.update(zip(eqn.outvars, found, strict=True))
        return [self._read(known, a, b) for a, b in zip(one.outvars, other.outvars, strict=True)]

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
        kinds = {value.kind for value in values}
        if "rows" not in kinds and len(values) == 2:
            left, right = values
            if name in ("mul", "div") and {"sum", "clean"} >= kinds:
                ranks = [_rank(atom) for atom in eqn.invars]
                return self._product(left, right, ranks, divided=name == "div")
            if name in ("add", "sub", "add_any") and "sum" in kinds:
                if right.kind == "clean" and right.zero:
                    return left
                return joined_sum(left, right)
        if name == "select_n" and "rows" not in kinds and values[0].kind == "clean" and "sum" in kinds:
            return _all_joined(values[1:])
        return together(values, [_rank(atom) for atom in eqn.invars], name)

    def _product(self, left: Alignment, right: Alignment, ranks: list[int], *, divided: bool) -> Alignment:
        degree = left.degree - right.degree if divided else left.degree + right.degree
        if left.kind == "sum" and right.kind == "sum":
            return unknown("a product or quotient of sums over rows")
        if right.kind == "sum":
            return unknown("a quotient by a sum over rows") if divided else right.with_(degree=degree)
        if left.kind == "sum":
            return left.with_(degree=degree)
        ranked = [value.constant for value, rank in zip((left, right), ranks, strict=True) if rank]
        constant = frozenset.intersection(*ranked) if ranked else frozenset()
        return clean(constant, zero=left.zero or (right.zero and not divided), degree=degree)

    def _iota(self, eqn, twin, values):
        return clean(set(range(_rank(eqn.outvars[0]))) - {eqn.params["dimension"]})

    # -- shapes ------------------------------------------------------------------------------------

    def _broadcast_in_dim(self, eqn, twin, values):
        value, to = values[0], eqn.params["broadcast_dimensions"]
        if value.kind == "rows":
            return value.with_(axis=to[value.axis])
        if value.kind == "sum":
            return value
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        constant = set(range(len(after))) - set(to)
        constant |= {new for old, new in enumerate(to) if old in value.constant or before[old] == 1 != after[new]}
        return value.with_(constant=frozenset(constant))

    def _reshape(self, eqn, twin, values):
        (value, *_), old, new = values, eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        if value.kind == "sum":
            return value
        if value.kind == "clean":
            wide_old, wide_new = ([axis for axis, size in enumerate(s) if size != 1] for s in (old, new))
            if len(value.constant) == len(old):
                return value.with_(constant=frozenset(range(len(new))))
            if [old[a] for a in wide_old] == [new[a] for a in wide_new]:
                kept = {b for a, b in zip(wide_old, wide_new, strict=True) if a in value.constant}
                return value.with_(constant=frozenset(kept | (set(range(len(new))) - set(wide_new))))
            return value.with_(constant=frozenset())
        before, size = math.prod(old[: value.axis]), old[value.axis]
        for axis in range(len(new)):
            if math.prod(new[:axis]) != before or (new[axis] == 1 != size):
                continue
            if new[axis] % size == 0:  # the axes that follow are joined to that of the rows
                return rows(axis, value.inner * (new[axis] // size))
            if size % new[axis] == 0 and value.inner % (size // new[axis]) == 0:  # or parted from it
                return rows(axis, value.inner // (size // new[axis]))
        return unknown("a reshape that takes rows apart")

    def _squeeze(self, eqn, twin, values):
        return _without(values[0], [axis % _rank(eqn.invars[0]) for axis in eqn.params["dimensions"]])

    def _transpose(self, eqn, twin, values):
        order = list(eqn.params["permutation"])
        value = values[0].with_(constant=frozenset(order.index(axis) for axis in values[0].constant))
        return value.with_(axis=order.index(value.axis)) if value.kind == "rows" else value

    def _rev(self, eqn, twin, values):
        return self._untouched(eqn, values, eqn.params["dimensions"])

    def _slice(self, eqn, twin, values):
        return self._cut(eqn, values)

    def _dynamic_slice(self, eqn, twin, values):
        if any(value.kind != "clean" for value in values[1:]):
            return unknown("a slice whose place depends on rows")
        return self._cut(eqn, values)

    def _cut(self, eqn, values):
        before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
        return self._untouched(eqn, values, [axis for axis in range(len(before)) if before[axis] != after[axis]])

    def _pad(self, eqn, twin, values):
        touched = [axis for axis, how in enumerate(eqn.params["padding_config"]) if any(how)]
        value = self._untouched(eqn, values, touched)
        return value if value.kind != "clean" else clean(value.constant - set(touched))

    def _split(self, eqn, twin, values):
        return self._untouched(eqn, values, [eqn.params["axis"]])

    def _concatenate(self, eqn, twin, values):
        axis = eqn.params["dimension"]
        if any(value.kind == "rows" and value.axis == axis for value in values):
            return unknown("a concatenation of rows")
        if {value.kind for value in values} <= {"sum", "clean"} and any(value.kind == "sum" for value in values):
            return unknown("a concatenation with a sum over rows")
        value = together(values, [_rank(atom) for atom in eqn.invars], "concatenate")
        return value if value.kind != "clean" else clean(value.constant - {axis})

    def _untouched(self, eqn, values, touched):
        value = values[0]
        if value.kind == "rows" and value.axis in touched:
            return unknown(f"a {eqn.primitive.name} along the axis of the rows")
        return value

    # -- reductions --------------------------------------------------------------------------------

    def _reduce(self, eqn, twin, values):
        (value, *_), axes, name = values, eqn.params["axes"], eqn.primitive.name
        if value.kind == "rows" and value.axis in axes:
            return SUM if name == "reduce_sum" else mixed(f"{name} over rows")
        if value.kind == "sum" and name != "reduce_sum":
            return unknown(f"{name} of a sum over rows")
        if value.kind == "clean" and name == "reduce_sum":
            counts = [math.prod(e.invars[0].aval.shape[axis] for axis in axes) for e in (eqn, twin)]
            degrees = [degree for degree in (0, 1) if counts[0] == counts[1] * self.ratio**degree]
            if not degrees:
                return unknown("a sum over more than the rows")
            value = value.with_(degree=value.degree + degrees[0])
        elif value.kind == "clean" and value.degree:
            return unknown(f"{name} of a number of rows")
        return _without(value, axes)

    def _along(self, eqn, twin, values):
        params = eqn.params
        axis = params.get("axis", params.get("dimension", _rank(eqn.invars[0]) - 1)) % _rank(eqn.invars[0])
        value = together(values, [_rank(atom) for atom in eqn.invars], eqn.primitive.name)
        if value.kind == "rows" and value.axis == axis:
            return mixed(f"{eqn.primitive.name} along the axis of the rows")
        return value if value.kind != "clean" else clean(value.constant - {axis})

    def _reduce_window(self, eqn, twin, values):
        params = eqn.params
        sizes = zip(params["window_dimensions"], params["window_strides"], params["padding"], strict=True)
        touched = [
            axis for axis, (size, stride, pad) in enumerate(sizes) if (size, stride, tuple(pad)) != (1, 1, (0, 0))
        ]
        value = self._untouched(eqn, values[:1], touched)
        if value.kind == "sum":
            return unknown("a window of a sum over rows")
        return value if value.kind != "clean" else clean()

    _reduce_window_sum = _reduce_window_max = _reduce_window_min = _reduce_window

    # -- products ----------------------------------------------------------------------------------

    def _dot_general(self, eqn, twin, values):
        (contracted, batched) = eqn.params["dimension_numbers"]
        left, right = values
        if left.kind == "clean" and right.kind == "clean":
            same = [e.invars[0].aval.shape[axis] for e in (eqn, twin) for axis in contracted[0]]
            half = len(same) // 2
            return (
                clean(degree=left.degree + right.degree)
                if same[:half] == same[half:]
                else unknown("a product over rows")
            )
        if "rows" not in (left.kind, right.kind):
            return self._product(left, right, [0, 0], divided=False)
        if "sum" in (left.kind, right.kind):
            return mixed("a product of rows with a sum over rows")
        if left.kind == right.kind:
            for pairs in (contracted, batched):
                if (left.axis, right.axis) in zip(*pairs, strict=True) and left.inner == right.inner:
                    return SUM if pairs is contracted else rows(list(batched[0]).index(left.axis), left.inner)
            return mixed("a product of rows with other rows")
        side = 0 if left.kind == "rows" else 1
        value, other = values[side], values[1 - side]
        if other.degree:
            return unknown("a product of rows with a number of rows")
        for pairs in (contracted, batched):
            if value.axis in pairs[side]:
                position = list(pairs[side]).index(value.axis)
                if pairs[1 - side][position] not in other.constant:
                    return unknown("a product of rows with what depends on their place in the batch")
                return SUM if pairs is contracted else rows(position, value.inner)
        taken = {*contracted[side], *batched[side]}
        free = [axis for axis in range(_rank(eqn.invars[side])) if axis not in taken]
        before = len(batched[0]) + (_rank(eqn.invars[0]) - len(contracted[0]) - len(batched[0]) if side else 0)
        return rows(before + free.index(value.axis), value.inner)

    def _conv_general_dilated(self, eqn, twin, values):
        left, right = values
        numbers = eqn.params["dimension_numbers"]
        if left.kind == "clean" == right.kind:
            return clean()
        if right.kind != "clean" or left.kind != "rows" or left.axis != numbers.lhs_spec[0] or right.degree:
            return unknown("a convolution over rows")
        return (
            rows(numbers.out_spec[0], left.inner) if eqn.params["batch_group_count"] == 1 else unknown("a convolution")
        )

    def _gather(self, eqn, twin, values):
        table, indices = values[:2]
        numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
        batch = [axis for axis in range(_rank(eqn.outvars[0])) if axis not in numbers.offset_dims]
        if table.kind == "clean" == indices.kind:
            return clean()
        if "sum" in (table.kind, indices.kind):
            return unknown("a gather with a sum over rows")
        places, taken = numbers.start_indices_batching_dims, numbers.operand_batching_dims
        if table.kind == "clean":
            return (
                rows(batch[indices.axis], indices.inner) if indices.axis not in places else unknown("a gather of rows")
            )
        if indices.kind == "rows":
            if (table.axis, indices.axis) in zip(taken, places, strict=True) and table.inner == indices.inner:
                return rows(batch[indices.axis], indices.inner)
            return unknown("a gather of rows by rows")
        kept = [a for a in range(_rank(eqn.invars[0])) if a not in (*numbers.collapsed_slice_dims, *taken)]
        whole = table.axis in kept and sizes[table.axis] == eqn.invars[0].aval.shape[table.axis]
        return rows(numbers.offset_dims[kept.index(table.axis)], table.inner) if whole else unknown("a gather of rows")

    # -- control flow ------------------------------------------------------------------------------

    def _scan(self, eqn, twin, values):
        params = eqn.params
        consts, carry, _ = scan_layout(eqn)
        body, theirs = called_jaxprs(eqn)[0], called_jaxprs(twin)[0]
        if params["length"] != twin.params["length"]:
            return [unknown("a scan over rows")] * len(eqn.outvars)
        sliced = [
            unknown("a scan over rows") if value.kind == "rows" and value.axis == 0 else _without(value, [0])
            for value in values[consts + carry :]
        ]
        state = values[consts : consts + carry]
        for _ in range(_TURNS):
            out = self.outputs(body, theirs, [*values[:consts], *state, *sliced])
            new = [joined(old, now) for old, now in zip(state, out[:carry], strict=True)]
            if new == state:
                return state + [_stacked(value) for value in out[carry:]]
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
        return [_all_joined(list(outs)) for outs in zip(*found, strict=True)]


def joined_sum(left: Alignment, right: Alignment) -> Alignment:
    """Of a sum or difference of two, of which one is a sum over rows."""
    if left.kind == "clean" and left.zero:
        return right
    if left.kind == right.kind:
        same = left.degree == right.degree
        return left.with_(pure=left.pure and right.pure) if same else unknown("a sum of means and sums over rows")
    own, other = (left, right) if left.kind == "sum" else (right, left)
    return own.with_(pure=False) if other.degree == 0 else unknown("a sum with a number of rows")


def _all_joined(values: list[Alignment]) -> Alignment:
    found = values[0]
    for value in values[1:]:
        found = joined(found, value)
    return found


def _without(value: Alignment, axes: Any) -> Alignment:
    """Of the value without those axes, none of which is that of the rows."""
    fewer = lambda axis: axis - sum(gone < axis for gone in axes)  # noqa: E731
    constant = frozenset(fewer(axis) for axis in value.constant if axis not in axes)
    value = value.with_(constant=constant)
    return value.with_(axis=fewer(value.axis)) if value.kind == "rows" else value


def _stacked(value: Alignment) -> Alignment:
    value = value.with_(constant=frozenset(axis + 1 for axis in value.constant))
    return value.with_(axis=value.axis + 1) if value.kind == "rows" else value


def _rank(atom: Any) -> int:
    return len(getattr(atom.aval, "shape", ()))


def batch_alignments(batch: Any, axes: tuple[int | None, ...]) -> list[Alignment]:
    """Of the leaves of a batch, in order; None leaves have none."""
    leaves = jax.tree.leaves(batch, is_leaf=lambda x: x is None)
    pairs = zip(leaves, axes, strict=True)
    return [clean() if axis is None else rows(axis) for leaf, axis in pairs if leaf is not None]
