"""Rules of reductions, windows, products and look-ups; `_rules` maps primitives to them."""

from jaxmem.accumulate.separability._row_values import (
    CLEAN,
    SUM,
    added,
    drop_axes,
    long_axes,
    mixed,
    rank,
    rows,
    rowwise,
    unknown,
    unless_along,
    worst,
)
from jaxmem.accumulate.separability._shape_rules import cut_by_number, product

# -- reductions ----------------------------------------------------------------------------------------------


def reduction(eqn, twin, values):
    (value, *_), axes, name = values, eqn.params["axes"], eqn.primitive.name
    over_rows = value.kind == "rows" and value.axis in axes
    others = set(axes) - {value.axis} if over_rows else set(axes)
    others &= long_axes(eqn.invars[0], twin.invars[0])
    if name == "reduce_sum":
        if value.kind == "rows" and others:
            return unknown("a sum of as many values as there are rows")
        if over_rows:
            return SUM
        return drop_axes(value, axes).with_(degree=0 if value.zero else value.degree + len(others))
    if over_rows:
        largest = name == "reduce_max" or (name == "reduce_or" and eqn.outvars[0].aval.dtype == bool)
        return mixed(f"{name} over rows").with_(kind="largest" if largest else "mixed")
    if value.kind == "sum":
        return unknown(f"{name} of a sum over rows", of_sum=True)
    if value.degree or (others and name == "reduce_prod"):
        return unknown(f"{name} of a number of rows, or of as many values")
    return drop_axes(value, axes).with_(uniform=False, zero=False)


def along_axis(eqn, twin, values):
    params, name, last = eqn.params, eqn.primitive.name, rank(eqn.invars[0]) - 1
    axis = params.get("axis", params.get("dimension", last)) % (last + 1)
    if any((value.kind, value.axis) == ("rows", axis) for value in values):
        return mixed(f"{name} along the axis of the rows")
    if bad := worst(values):
        return bad
    if any(value.kind == "rows" for value in values):
        return rowwise(values, name)
    if name != "cumsum" and any(value.kind == "sum" or value.degree for value in values):
        of_sum = values[0].kind == "sum"
        return unknown(f"{name} of a sum over rows, or of a number of rows", of_sum=of_sum)
    return unless_along(eqn, twin, added(values, name).with_(uniform=False, zero=False), [axis])


def window(eqn, twin, values):
    params = eqn.params
    sizes = zip(params["window_dimensions"], params["window_strides"], params["padding"], strict=True)
    touched = [axis for axis, (size, stride, pad) in enumerate(sizes) if (size, stride, tuple(pad)) != (1, 1, (0, 0))]
    if any(value.kind == "rows" for value in values):
        return unless_along(eqn, twin, rowwise(values, "a window"), touched)
    if eqn.primitive.name != "reduce_window_sum" and any(value.kind == "sum" or value.degree for value in values):
        of_sum = any(value.kind == "sum" for value in values)
        return unknown("a window of a sum over rows, or of a number of rows", of_sum=of_sum)
    return unless_along(eqn, twin, added(values, "a window").with_(uniform=False, zero=False), touched)


def fft(eqn, twin, values):
    last = rank(eqn.invars[0])
    axes = range(last - len(eqn.params["fft_lengths"]), last)
    return unless_along(eqn, twin, values[0].with_(uniform=False, zero=False), axes)


# -- products and look-ups -----------------------------------------------------------------------------------


def dot_general(eqn, twin, values):
    contracted, batched = eqn.params["dimension_numbers"]
    left, right = values
    long = long_axes(eqn.invars[0], twin.invars[0])
    for mine, theirs in zip(*contracted, strict=True):
        if mine in long and ("rows", mine) != (left.kind, left.axis) and ("rows", theirs) != (right.kind, right.axis):
            return unknown("a product over as many values as there are rows")
    if "rows" not in (left.kind, right.kind):
        return product(left, right).with_(uniform=False)
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
        return unknown("a product of rows with a number of rows").with_(degree=1)
    if value.axis in contracted[side]:
        return SUM
    if value.axis in batched[side]:
        return rows(list(batched[side]).index(value.axis), value.inner)
    taken = {*contracted[side], *batched[side]}
    free = [axis for axis in range(rank(eqn.invars[side])) if axis not in taken]
    before = len(batched[0]) + (rank(eqn.invars[0]) - len(contracted[0]) - len(batched[0]) if side else 0)
    return rows(before + free.index(value.axis), value.inner)


def conv_general_dilated(eqn, twin, values):
    left, right = values
    numbers, groups = eqn.params["dimension_numbers"], eqn.params["batch_group_count"]
    if left.kind == "rows" and left.axis == numbers.lhs_spec[0] and right.kind == "clean" and not right.degree:
        return rows(numbers.out_spec[0], left.inner) if groups == 1 else unknown("a convolution of groups of rows")
    kernel = left.kind == right.kind == "rows" and (left.axis, right.axis) == (numbers.lhs_spec[1], numbers.rhs_spec[1])
    if kernel and left.inner == right.inner and eqn.params["feature_group_count"] == 1:
        return SUM  # the gradient of a kernel
    if left.kind == right.kind == "clean" and not left.degree and not right.degree:
        return unless_along(eqn, twin, CLEAN, range(rank(eqn.outvars[0])))
    return unknown("a convolution over rows", of_sum=left.kind == right.kind == "sum")


def gather(eqn, twin, values):
    table, indices = values[:2]
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batch = [axis for axis in range(rank(eqn.outvars[0])) if axis not in numbers.offset_dims]
    places, taken = numbers.start_indices_batching_dims, numbers.operand_batching_dims
    if indices.kind == "sum" or indices.degree or (table.degree and indices.kind == "rows"):
        return unknown("a gather by a sum over rows, or a number of them")
    if cut_by_number(eqn, twin, "slice_sizes"):
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


def scatter(eqn, twin, values):
    target, indices, updates = values
    numbers, adds = eqn.params["dimension_numbers"], eqn.primitive.name == "scatter-add"
    if indices.kind == "sum" or any(value.degree for value in values if value.kind != "sum"):
        return unknown("a scatter by a sum over rows, or of a number of them")
    long, _, long_updates = (long_axes(*pair) for pair in zip(eqn.invars, twin.invars, strict=True))
    places = [axis for axis in range(rank(eqn.invars[2])) if axis not in numbers.update_window_dims]
    batched = dict(zip(numbers.scatter_indices_batching_dims, numbers.operand_batching_dims, strict=True))
    taken = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    window = [axis for axis in range(rank(eqn.invars[0])) if axis not in taken]
    # Axis of the updates -> axis of the target.
    to = {places[place]: axis for place, axis in batched.items()}
    to |= dict(zip(numbers.update_window_dims, window, strict=True))
    one, other = eqn.invars[2].aval.shape, eqn.invars[0].aval.shape
    to = {mine: theirs for mine, theirs in to.items() if one[mine] == other[theirs]}
    if "rows" not in (target.kind, indices.kind, updates.kind):
        whole = long == {to.get(axis) for axis in long_updates}
        return (
            added([target, updates], "a scatter").with_(uniform=False) if whole else unknown("a scatter of many rows")
        )
    # (axis of the target, inner) for each operand with rows; -1 for rows that are summed.
    at = [] if target.kind != "rows" else [(target.axis, target.inner)]
    if indices.kind == "rows":
        at.append((batched.get(indices.axis, -1), indices.inner))
    if updates.kind == "rows":
        at.append((to.get(updates.axis, -1 if updates.axis in places else -2), updates.inner))
        if indices.kind == "rows" and places.index(updates.axis) != indices.axis:
            return unknown("a scatter of rows by other rows")
    (axis, inner), *rest = at
    own = {updates.axis} if updates.kind == "rows" else {mine for mine, theirs in to.items() if theirs == axis}
    if updates.kind == "clean" and axis == -1:  # the same numbers, such as ones, for each row
        own = {places[indices.axis]}
    if "sum" in (target.kind, updates.kind) and axis >= 0:
        return mixed("a scatter of a sum over rows to rows")
    if long - {axis} or long_updates - own or any(found != (axis, inner) for found in rest):
        return unknown("a scatter of rows")
    if axis in to.values():
        return rows(axis, inner)
    summed = adds and axis == -1 and updates.kind in ("rows", "clean")
    return added([target, SUM], "a scatter") if summed else unknown("a scatter of rows")
