"""What primitives do to the rows of a batch: a rule each; what has none is not known.

A rule gets the equation, its twin in the program of fewer rows, and its inputs, none of which is mixed or unknown.
"""

import math
from collections.abc import Callable

import jax.numpy as jnp

from jaxmem.accumulate._rows import (
    CLEAN,
    SUM,
    UNIFORM,
    added,
    either,
    long_axes,
    mixed,
    rank,
    rows,
    together,
    unknown,
    worst,
)

RULES: dict[str, Callable] = {}


def _rule(names: str) -> Callable:
    def register(rule: Callable) -> Callable:
        RULES.update(dict.fromkeys(names.split(), rule))
        return rule

    return register


def _touched(eqn, twin, value, axes):
    """What an operation along `axes` leaves, where it has no place along that of the rows."""
    if value.kind == "rows" and value.axis in axes:
        return unknown(f"{eqn.primitive.name} along the axis of the rows")
    if long_axes(eqn.outvars[0], twin.outvars[0]) & set(axes):
        return unknown("what depends on the place of a row in the batch")
    return value


# -- each element by itself ----------------------------------------------------------------------------------


@_rule(
    """convert_element_type copy copy_p name neg optimization_barrier pcast pvary reduce_precision stop_gradient
    real imag conj"""
)
def _same(eqn, twin, values):
    before, after = (atom.aval.dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    if any(value.kind == "sum" for value in values) and _rounds(eqn, before, after):
        return unknown(f"{eqn.primitive.name} of a sum over rows, which rounds it", of_sum=True)
    exact = all(jnp.issubdtype(dtype, jnp.integer) for dtype in (before, after)) or jnp.issubdtype(after, jnp.inexact)
    if before != after and not exact and any(value.kind == "sum" or value.degree for value in values):
        return unknown("a sum over rows, or a number of them, that is rounded")
    return values if len(values) == len(eqn.outvars) else unknown(eqn.primitive.name)


def _rounds(eqn, before, after) -> bool:
    """Whether it leaves fewer digits than 16 bits have, so that parts are not rounded as their sum is."""
    if eqn.primitive.name == "reduce_precision":  # to its own precision it only keeps the compiler from having more
        info = jnp.finfo(before)
        return eqn.params["mantissa_bits"] < info.nmant or eqn.params["exponent_bits"] < info.nexp
    return before != after and jnp.issubdtype(after, jnp.floating) and after.itemsize < 2


@_rule(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clamp complex cos cosh
    digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le lgamma log log1p logistic lt max
    min mul ne nextafter not one_minus_square or population_count pow rem round rsqrt select_n shift_left
    shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor"""
)
def _elementwise(eqn, twin, values):
    name = eqn.primitive.name
    if any(value.kind == "rows" for value in values):
        return together(values, name)
    if name in ("mul", "div"):
        return _product(*values, divided=name == "div")
    if name in ("add", "sub", "add_any", "complex"):
        return added(values, name)
    if name == "select_n" and values[0].kind == "clean" and not values[0].degree:
        return either(values[1:], name).with_(uniform=False)
    if any(value.kind == "sum" for value in values):
        return unknown(f"{name} of a sum over rows is linear in no row", of_sum=True)
    if any(value.degree for value in values):
        return added(values, name) if name in ("max", "min") else unknown(f"{name} of a number of rows")
    return CLEAN.with_(uniform=all(value.uniform for value in values))


def _product(left, right, *, divided=False):
    if left.zero or (right.zero and not divided):
        return UNIFORM.with_(zero=True)
    degree = left.degree - right.degree if divided else left.degree + right.degree
    if "sum" not in (left.kind, right.kind):
        return CLEAN.with_(degree=degree, uniform=left.uniform and right.uniform)
    if left.kind == right.kind or (divided and right.kind == "sum"):
        return unknown("a product of sums over rows, or a quotient by one", of_sum=True)
    return SUM.with_(degree=degree)


@_rule("iota")
def _iota(eqn, twin, values):
    return _touched(eqn, twin, CLEAN, [eqn.params["dimension"]])


# -- shapes --------------------------------------------------------------------------------------------------


@_rule("broadcast_in_dim")
def _broadcast_in_dim(eqn, twin, values):
    value = values[0]
    return value.with_(axis=eqn.params["broadcast_dimensions"][value.axis]) if value.kind == "rows" else value


@_rule("reshape")
def _reshape(eqn, twin, values):
    value = values[0]
    (old, new), (their_old, their_new) = ([e.invars[0].aval.shape, e.outvars[0].aval.shape] for e in (eqn, twin))
    if value.kind != "rows":
        moves = [s for s in old if s != 1] != [s for s in new if s != 1]
        moves &= bool(long_axes(eqn.invars[0], twin.invars[0]) | long_axes(eqn.outvars[0], twin.outvars[0]))
        return unknown("a reshape along as many values as there are rows") if moves and not value.uniform else value
    before, size = math.prod(old[: value.axis]), old[value.axis]
    for axis in range(len(new)):
        if math.prod(new[:axis]) != before or (new[axis] == 1 != size):
            continue
        inner, rest = divmod(value.inner * new[axis], size)  # axes are joined to that of the rows, or parted from it
        same = math.prod(their_new[:axis]) == math.prod(their_old[: value.axis])
        if inner and not rest and same and inner * their_old[value.axis] == value.inner * their_new[axis]:
            return rows(axis, inner)
    return unknown("a reshape that takes rows apart")


def _without(value, axes):
    """Of the value without those axes, none of which is that of the rows."""
    if value.kind != "rows":
        return value
    return value.with_(axis=value.axis - sum(axis < value.axis for axis in axes))


@_rule("squeeze")
def _squeeze(eqn, twin, values):
    return _without(values[0], [axis % rank(eqn.invars[0]) for axis in eqn.params["dimensions"]])


@_rule("unstack")
def _unstack(eqn, twin, values):
    value, axis = values[0], eqn.params["axis"]
    if (value.kind == "rows" and value.axis == axis) or axis in long_axes(eqn.invars[0], twin.invars[0]):
        return unknown("unstack along the axis of the rows")
    return _without(value, [axis])


@_rule("stack")
def _stack(eqn, twin, values):
    value = either(values, "stack").with_(uniform=all(value.zero for value in values))
    return value.with_(axis=value.axis + (eqn.params["axis"] <= value.axis)) if value.kind == "rows" else value


@_rule("transpose")
def _transpose(eqn, twin, values):
    value = values[0]
    return value.with_(axis=list(eqn.params["permutation"]).index(value.axis)) if value.kind == "rows" else value


@_rule("rev")
def _rev(eqn, twin, values):
    if values[0].kind == "rows" and values[0].axis in eqn.params["dimensions"]:
        return unknown("rev along the axis of the rows")
    return values[0]


@_rule("split slice dynamic_slice")
def _cut(eqn, twin, values):
    value, long = values[0], long_axes(eqn.invars[0], twin.invars[0])
    if any(index.kind != "clean" or index.degree for index in values[1:]):
        return unknown("a slice whose place depends on rows")
    before = eqn.invars[0].aval.shape
    if value.kind == "rows" and any(out.aval.shape[value.axis] != before[value.axis] for out in eqn.outvars):
        return unknown(f"{eqn.primitive.name} along the axis of the rows")
    if _cut_by_number(eqn, twin, "start_indices", "limit_indices", "slice_sizes") or (
        eqn.params.get("sizes") != twin.params.get("sizes") and eqn.params["axis"] not in long
    ):
        return unknown("a slice whose place depends on the number of rows")
    return value


def _cut_by_number(eqn, twin, *names):
    """Whether the number of rows says where an axis that is not of their number is cut."""
    long = long_axes(eqn.invars[0], twin.invars[0])
    cuts = [zip(eqn.params[name], twin.params[name], strict=True) for name in names if name in eqn.params]
    return any(mine != theirs and axis not in long for cut in cuts for axis, (mine, theirs) in enumerate(cut))


@_rule("pad")
def _pad(eqn, twin, values):
    value, filling = values
    config, theirs = (e.params["padding_config"] for e in (eqn, twin))
    value = _touched(eqn, twin, value, [axis for axis, how in enumerate(config) if any(how)])
    if config != theirs:
        return unknown("a pad by a number of rows")
    if value.kind == "rows":
        return together(values, "pad")
    return added(values, "pad").with_(uniform=value.zero and filling.zero)


@_rule("concatenate")
def _concatenate(eqn, twin, values):
    axis = eqn.params["dimension"]
    joined = either(values, "concatenate").with_(uniform=all(value.zero for value in values))
    return _touched(eqn, twin, joined, [axis])


@_rule("dynamic_update_slice")
def _dynamic_update_slice(eqn, twin, values):
    if any(index.kind != "clean" or index.degree for index in values[2:]):
        return unknown("a slice whose place depends on rows")
    whole, part = (atom.aval.shape for atom in eqn.invars[:2])
    value = either(values[:2], "dynamic_update_slice").with_(uniform=all(value.zero for value in values[:2]))
    return _touched(eqn, twin, value, [axis for axis in range(len(whole)) if whole[axis] != part[axis]])


# -- reductions ----------------------------------------------------------------------------------------------


@_rule("reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin")
def _reduce(eqn, twin, values):
    (value, *_), axes, name = values, eqn.params["axes"], eqn.primitive.name
    over_rows = value.kind == "rows" and value.axis in axes
    others = set(axes) - {value.axis} if over_rows else set(axes)
    others &= long_axes(eqn.invars[0], twin.invars[0])
    if name == "reduce_sum":
        if value.kind == "rows" and others:
            return unknown("a sum of as many values as there are rows")
        if over_rows:
            return SUM
        return _without(value, axes).with_(degree=0 if value.zero else value.degree + len(others))
    if over_rows:
        largest = name == "reduce_max" or (name == "reduce_or" and eqn.outvars[0].aval.dtype == bool)
        return mixed(f"{name} over rows").with_(kind="largest" if largest else "mixed")
    if value.kind == "sum":
        return unknown(f"{name} of a sum over rows", of_sum=True)
    if value.degree or (others and name == "reduce_prod"):
        return unknown(f"{name} of a number of rows, or of as many values")
    return _without(value, axes).with_(uniform=False, zero=False)


@_rule("cumsum cumprod cummax cummin cumlogsumexp sort top_k")
def _along(eqn, twin, values):
    params, name, last = eqn.params, eqn.primitive.name, rank(eqn.invars[0]) - 1
    axis = params.get("axis", params.get("dimension", last)) % (last + 1)
    if any((value.kind, value.axis) == ("rows", axis) for value in values):
        return mixed(f"{name} along the axis of the rows")
    if bad := worst(values):
        return bad
    if any(value.kind == "rows" for value in values):
        return together(values, name)
    if name != "cumsum" and any(value.kind == "sum" or value.degree for value in values):
        return unknown(f"{name} of a sum over rows, or of a number of rows")
    return _touched(eqn, twin, added(values, name).with_(uniform=False, zero=False), [axis])


@_rule("reduce_window_sum reduce_window_max reduce_window_min select_and_scatter_add select_and_gather_add")
def _window(eqn, twin, values):
    params = eqn.params
    sizes = zip(params["window_dimensions"], params["window_strides"], params["padding"], strict=True)
    touched = [axis for axis, (size, stride, pad) in enumerate(sizes) if (size, stride, tuple(pad)) != (1, 1, (0, 0))]
    if any(value.kind == "rows" for value in values):
        return _touched(eqn, twin, together(values, "a window"), touched)
    if eqn.primitive.name != "reduce_window_sum" and any(value.kind == "sum" or value.degree for value in values):
        return unknown("a window of a sum over rows, or of a number of rows")
    return _touched(eqn, twin, added(values, "a window").with_(uniform=False, zero=False), touched)


@_rule("fft")
def _fft(eqn, twin, values):
    last = rank(eqn.invars[0])
    axes = range(last - len(eqn.params["fft_lengths"]), last)
    return _touched(eqn, twin, values[0].with_(uniform=False, zero=False), axes)


# -- products and look-ups -----------------------------------------------------------------------------------


@_rule("dot_general")
def _dot_general(eqn, twin, values):
    contracted, batched = eqn.params["dimension_numbers"]
    left, right = values
    long = long_axes(eqn.invars[0], twin.invars[0])
    for mine, theirs in zip(*contracted, strict=True):
        if mine in long and ("rows", mine) != (left.kind, left.axis) and ("rows", theirs) != (right.kind, right.axis):
            return unknown("a product over as many values as there are rows")
    if "rows" not in (left.kind, right.kind):
        return _product(left, right).with_(uniform=False)
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
    if value.axis in contracted[side]:
        return SUM
    if value.axis in batched[side]:
        return rows(list(batched[side]).index(value.axis), value.inner)
    taken = {*contracted[side], *batched[side]}
    free = [axis for axis in range(rank(eqn.invars[side])) if axis not in taken]
    before = len(batched[0]) + (rank(eqn.invars[0]) - len(contracted[0]) - len(batched[0]) if side else 0)
    return rows(before + free.index(value.axis), value.inner)


@_rule("conv_general_dilated")
def _conv_general_dilated(eqn, twin, values):
    left, right = values
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["batch_group_count"]
    if left.kind == "rows" and left.axis == numbers.lhs_spec[0] and right.kind == "clean" and not right.degree:
        return rows(numbers.out_spec[0], left.inner) if groups == 1 else unknown("a convolution of groups of rows")
    kernel = left.kind == right.kind == "rows" and (left.axis, right.axis) == (numbers.lhs_spec[1], numbers.rhs_spec[1])
    if kernel and left.inner == right.inner and eqn.params["feature_group_count"] == 1:
        return SUM  # the gradient of a kernel
    if left.kind == right.kind == "clean" and not left.degree and not right.degree:
        return _touched(eqn, twin, CLEAN, range(rank(eqn.outvars[0])))
    return unknown("a convolution over rows")


@_rule("gather")
def _gather(eqn, twin, values):
    table, indices = values[:2]
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batch = [axis for axis in range(rank(eqn.outvars[0])) if axis not in numbers.offset_dims]
    places, taken = numbers.start_indices_batching_dims, numbers.operand_batching_dims
    if indices.kind == "sum" or indices.degree or (table.degree and indices.kind == "rows"):
        return unknown("a gather by a sum over rows, or a number of them")
    if _cut_by_number(eqn, twin, "slice_sizes"):
        return unknown("a gather whose place depends on the number of rows")
    if indices.kind == "clean" and table.kind != "rows":
        return table.with_(uniform=False, zero=False)
    if table.kind == "sum":
        return mixed("a gather from a sum over rows by rows")
    if table.kind == "clean":
        good = indices.axis not in places
        return rows(batch[indices.axis], indices.inner) if good else unknown("a gather of rows")
    if indices.kind == "rows":
        if (table.axis, indices.axis) in zip(taken, places, strict=True) and table.inner == indices.inner:
            return rows(batch[indices.axis], indices.inner)
        return unknown("a gather of rows by rows")
    kept = [a for a in range(rank(eqn.invars[0])) if a not in (*numbers.collapsed_slice_dims, *taken)]
    whole = table.axis in kept and sizes[table.axis] == eqn.invars[0].aval.shape[table.axis]
    return rows(numbers.offset_dims[kept.index(table.axis)], table.inner) if whole else unknown("a gather of rows")


@_rule("scatter scatter-add")
def _scatter(eqn, twin, values):
    target, indices, updates = values
    numbers, adds = eqn.params["dimension_numbers"], eqn.primitive.name == "scatter-add"
    if indices.kind == "sum" or any(value.degree for value in values if value.kind != "sum"):
        return unknown("a scatter by a sum over rows, or of a number of them")
    long, _, long_updates = (long_axes(*pair) for pair in zip(eqn.invars, twin.invars, strict=True))
    places = [axis for axis in range(rank(eqn.invars[2])) if axis not in numbers.update_window_dims]
    batched = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    taken = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [axis for axis in range(rank(eqn.invars[0])) if axis not in taken]
    # The axis of the target that belongs to each of the updates.
    to = {places[place]: axis for place, axis in batched.items()}
    to |= dict(zip(numbers.update_window_dims, window, strict=True))
    one, other = eqn.invars[2].aval.shape, eqn.invars[0].aval.shape
    to = {mine: theirs for mine, theirs in to.items() if one[mine] == other[theirs]}
    if "rows" not in (target.kind, indices.kind, updates.kind):
        whole = long == {to.get(axis) for axis in long_updates}
        return (
            added([target, updates], "a scatter").with_(uniform=False) if whole else unknown("a scatter of many rows")
        )
    # All of them in the axes of the target; -1 for rows that are summed.
    at = [] if target.kind != "rows" else [(target.axis, target.inner)]
    if indices.kind == "rows":
        at.append((batched.get(indices.axis, -1), indices.inner))
    if updates.kind == "rows":
        at.append((to.get(updates.axis, -1 if updates.axis in places else -2), updates.inner))
        if indices.kind == "rows" and places.index(updates.axis) != indices.axis:
            return unknown("a scatter of rows by other rows")
    (axis, inner), *rest = at
    own = {updates.axis} if updates.kind == "rows" else {mine for mine, theirs in to.items() if theirs == axis}
    if "sum" in (target.kind, updates.kind) and axis >= 0:
        return mixed("a scatter of a sum over rows to rows")
    if long - {axis} or long_updates - own or any(found != (axis, inner) for found in rest):
        return unknown("a scatter of rows")
    if axis in to.values():
        return rows(axis, inner)
    summed = adds and axis == -1 and updates.kind == "rows"
    return added([target, SUM], "a scatter") if summed else unknown("a scatter of rows")
