"""Rules of elementwise operations and changes of shape; `_rules` maps primitives to them."""

import math

import jax.numpy as jnp

from jaxmem.accumulate.separability._row_values import (
    CLEAN,
    SUM,
    UNIFORM,
    added,
    drop_axes,
    join,
    long_axes,
    mixed,
    rank,
    rows,
    rowwise,
    unknown,
    unless_along,
)

# -- elementwise --------------------------------------------------------------------------------------------


def unchanged(eqn, twin, values):
    before, after = (atom.aval.dtype for atom in (eqn.invars[0], eqn.outvars[0]))
    if any(value.kind == "sum" for value in values) and _rounds(eqn, before, after):
        return unknown(f"{eqn.primitive.name} of a sum over rows, which rounds it", of_sum=True)
    exact = all(jnp.issubdtype(dtype, jnp.integer) for dtype in (before, after)) or jnp.issubdtype(after, jnp.inexact)
    if before != after and not exact and any(value.kind == "sum" or value.degree for value in values):
        return unknown("a sum over rows, or a number of them, that is rounded")
    return values if len(values) == len(eqn.outvars) else unknown(eqn.primitive.name)


def _rounds(eqn, before, after) -> bool:
    """Whether the result has less than 16 bits, so that rounding the parts of a sum is not rounding the sum."""
    if eqn.primitive.name == "reduce_precision":  # to its own precision it only removes the compiler's excess precision
        info = jnp.finfo(before)
        return eqn.params["mantissa_bits"] < info.nmant or eqn.params["exponent_bits"] < info.nexp
    return before != after and jnp.issubdtype(after, jnp.floating) and after.itemsize < 2


def elementwise(eqn, twin, values):
    name = eqn.primitive.name
    if any(value.kind == "rows" for value in values):
        return rowwise(values, name)
    if name in ("mul", "div"):
        return product(*values, divided=name == "div")
    if name in ("add", "sub", "add_any", "complex"):
        return added(values, name)
    if name == "select_n" and values[0].kind == "clean" and not values[0].degree:
        return join(values[1:], name).with_(uniform=False)
    if any(value.kind == "sum" for value in values):
        return unknown(f"{name} of a sum over rows is linear in no row", of_sum=True)
    if any(value.degree for value in values):
        return added(values, name) if name in ("max", "min") else unknown(f"{name} of a number of rows")
    return CLEAN.with_(uniform=all(value.uniform for value in values))


def product(left, right, *, divided=False):
    """The product, or the quotient, of two values without rows."""
    if left.zero or (right.zero and not divided):
        return UNIFORM.with_(zero=True)
    degree = left.degree - right.degree if divided else left.degree + right.degree
    if "sum" not in (left.kind, right.kind):
        return CLEAN.with_(degree=degree, uniform=left.uniform and right.uniform)
    if left.kind == right.kind or (divided and right.kind == "sum"):
        return unknown("a product of sums over rows, or a quotient by one", of_sum=True)
    return SUM.with_(degree=degree)


def iota(eqn, twin, values):
    return unless_along(eqn, twin, CLEAN, [eqn.params["dimension"]])


# -- shapes --------------------------------------------------------------------------------------------------


def broadcast_in_dim(eqn, twin, values):
    value = values[0]
    return value.with_(axis=eqn.params["broadcast_dimensions"][value.axis]) if value.kind == "rows" else value


def reshape(eqn, twin, values):
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
        inner, rest = divmod(value.inner * new[axis], size)  # axes are merged with that of the rows, or split off
        same = math.prod(their_new[:axis]) == math.prod(their_old[: value.axis])
        if inner and not rest and same and inner * their_old[value.axis] == value.inner * their_new[axis]:
            return rows(axis, inner)
    return unknown("a reshape that takes rows apart")


def squeeze(eqn, twin, values):
    return drop_axes(values[0], [axis % rank(eqn.invars[0]) for axis in eqn.params["dimensions"]])


def unstack(eqn, twin, values):
    value, axis = values[0], eqn.params["axis"]
    if (value.kind == "rows" and value.axis == axis) or axis in long_axes(eqn.invars[0], twin.invars[0]):
        return unknown("unstack along the axis of the rows")
    return drop_axes(value, [axis])


def stack(eqn, twin, values):
    value = join(values, "stack").with_(uniform=all(value.zero for value in values))
    return value.with_(axis=value.axis + (eqn.params["axis"] <= value.axis)) if value.kind == "rows" else value


def transpose(eqn, twin, values):
    value = values[0]
    return value.with_(axis=list(eqn.params["permutation"]).index(value.axis)) if value.kind == "rows" else value


def rev(eqn, twin, values):
    if values[0].kind == "rows" and values[0].axis in eqn.params["dimensions"]:
        return mixed("rev along the axis of the rows")
    return values[0]


def slice_(eqn, twin, values):
    value, long = values[0], long_axes(eqn.invars[0], twin.invars[0])
    if any(index.kind != "clean" or index.degree for index in values[1:]):
        return unknown("a slice whose place depends on rows")
    before = eqn.invars[0].aval.shape
    if value.kind == "rows" and any(out.aval.shape[value.axis] != before[value.axis] for out in eqn.outvars):
        return unknown(f"{eqn.primitive.name} along the axis of the rows")
    if cut_by_number(eqn, twin, "start_indices", "limit_indices", "slice_sizes") or (
        eqn.params.get("sizes") != twin.params.get("sizes") and eqn.params["axis"] not in long
    ):
        return unknown("a slice whose place depends on the number of rows")
    return value


def cut_by_number(eqn, twin, *names):
    """Whether the place of a cut, along an axis that is not long, depends on the number of rows."""
    long = long_axes(eqn.invars[0], twin.invars[0])
    cuts = [zip(eqn.params[name], twin.params[name], strict=True) for name in names if name in eqn.params]
    return any(mine != theirs and axis not in long for cut in cuts for axis, (mine, theirs) in enumerate(cut))


def pad(eqn, twin, values):
    value, filling = values
    config, theirs = (e.params["padding_config"] for e in (eqn, twin))
    value = unless_along(eqn, twin, value, [axis for axis, how in enumerate(config) if any(how)])
    if config != theirs:
        return unknown("a pad by a number of rows")
    if value.kind == "unknown":
        return value
    if value.kind == "rows":
        return rowwise(values, "pad")
    return added(values, "pad").with_(uniform=value.zero and filling.zero)


def concatenate(eqn, twin, values):
    axis = eqn.params["dimension"]
    joined = join(values, "concatenate").with_(uniform=all(value.zero for value in values))
    return unless_along(eqn, twin, joined, [axis])


def dynamic_update_slice(eqn, twin, values):
    if any(index.kind != "clean" or index.degree for index in values[2:]):
        return unknown("a slice whose place depends on rows")
    whole, part = (atom.aval.shape for atom in eqn.invars[:2])
    value = join(values[:2], "dynamic_update_slice").with_(uniform=all(value.zero for value in values[:2]))
    return unless_along(eqn, twin, value, [axis for axis in range(len(whole)) if whole[axis] != part[axis]])
