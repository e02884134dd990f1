"""Rows through operations that change shapes, and through reductions."""

import math
from typing import Any

from jaxmem.accumulate._alignment import SUM, clean, mixed, rows, together, unknown, without


class ShapeRules:
    """Methods named after primitives: of an equation, its twin in the program of fewer rows, and its inputs."""

    ratio: int

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
        return without(values[0], [axis % rank(eqn.invars[0]) for axis in eqn.params["dimensions"]])

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
        if values[0].kind == "sum":
            return unknown("a pad of a sum over rows")
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
        value = together(values, [rank(atom) for atom in eqn.invars], "concatenate")
        return value if value.kind != "clean" else clean(value.constant - {axis})

    def _untouched(self, eqn, values, touched):
        value = values[0]
        if value.kind == "rows" and value.axis in touched:
            return unknown(f"a {eqn.primitive.name} along the axis of the rows")
        return value

    # -- reductions --------------------------------------------------------------------------------

    def _reduce(self, eqn, twin, values):
        (value, *_), axes, name = values, eqn.params["axes"], eqn.primitive.name
        over_rows = value.kind == "rows" and value.axis in axes
        if over_rows and name != "reduce_sum":
            return mixed(f"{name} over rows")
        if value.kind == "sum" and name != "reduce_sum":
            return unknown(f"{name} of a sum over rows")
        others = [axis for axis in axes if not (over_rows and axis == value.axis)]
        counts = [math.prod(e.invars[0].aval.shape[axis] for axis in others) for e in (eqn, twin)]
        if counts[0] != counts[1] and name in ("reduce_sum", "reduce_prod", "reduce_xor"):
            # As many of the same as there are rows.
            if name != "reduce_sum" or (value.kind == "rows" and not over_rows) or counts[0] != counts[1] * self.ratio:
                return unknown(f"{name} of as many values as there are rows")
            return SUM.with_(degree=1) if over_rows else without(value.with_(degree=value.degree + 1), axes)
        if over_rows:
            return SUM
        if value.kind == "clean" and value.degree and name != "reduce_sum":
            return unknown(f"{name} of a number of rows")
        return without(value, axes)

    def _along(self, eqn, twin, values):
        params = eqn.params
        axis = params.get("axis", params.get("dimension", rank(eqn.invars[0]) - 1)) % rank(eqn.invars[0])
        value = together(values, [rank(atom) for atom in eqn.invars], eqn.primitive.name)
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


def rank(atom: Any) -> int:
    """Number of dimensions."""
    return len(getattr(atom.aval, "shape", ()))
