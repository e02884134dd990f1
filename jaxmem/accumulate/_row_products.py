"""Rows through products, convolutions and look-ups."""

from jaxmem.accumulate._alignment import SUM, Alignment, clean, mixed, rows, unknown
from jaxmem.accumulate._row_shapes import rank


class ProductRules:
    """As `ShapeRules`."""

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
        side = 0 if left.kind == "rows" else 1
        value, other = values[side], values[1 - side]
        rest = [axis for axis in contracted[side] if value.kind != "rows" or axis != value.axis]
        same = [[e.invars[side].aval.shape[axis] for axis in rest] for e in (eqn, twin)]
        if same[0] != same[1]:
            return unknown("a product over as many values as there are rows")
        if "rows" not in (left.kind, right.kind):
            return self._product(left, right, [0, 0], divided=False)
        if "sum" in (left.kind, right.kind):
            return mixed("a product of rows with a sum over rows")
        if left.kind == right.kind:
            for pairs in (contracted, batched):
                if (left.axis, right.axis) in zip(*pairs, strict=True) and left.inner == right.inner:
                    return SUM if pairs is contracted else rows(list(batched[0]).index(left.axis), left.inner)
            return mixed("a product of rows with other rows")
        if other.degree:
            return unknown("a product of rows with a number of rows")
        for pairs in (contracted, batched):
            if value.axis in pairs[side]:
                position = list(pairs[side]).index(value.axis)
                if pairs[1 - side][position] not in other.constant:
                    return unknown("a product of rows with what depends on their place in the batch")
                return SUM if pairs is contracted else rows(position, value.inner)
        taken = {*contracted[side], *batched[side]}
        free = [axis for axis in range(rank(eqn.invars[side])) if axis not in taken]
        before = len(batched[0]) + (rank(eqn.invars[0]) - len(contracted[0]) - len(batched[0]) if side else 0)
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
        batch = [axis for axis in range(rank(eqn.outvars[0])) if axis not in numbers.offset_dims]
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
        kept = [a for a in range(rank(eqn.invars[0])) if a not in (*numbers.collapsed_slice_dims, *taken)]
        whole = table.axis in kept and sizes[table.axis] == eqn.invars[0].aval.shape[table.axis]
        return rows(numbers.offset_dims[kept.index(table.axis)], table.inner) if whole else unknown("a gather of rows")
