"""What is known of how one value of a program depends on the rows of its batch, and how such knowledge combines."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Value:
    """How one value depends on rows.

    Args:
      kind: "clean", depends on no row; "rows", each index along `axis` belongs to one row and depends on that row only;
        "sum", a sum over rows of terms that each depend on one row; "largest", a maximum of such terms; "mixed", an
        element depends on several rows; "unknown".
      axis: for "rows".
      inner: for "rows", how many neighbours along `axis` belong to the same row.
      degree: for "clean" and "sum", the power of the number of rows n by which its factors grow: 1 for `x.size`, -1
        for the factor in a mean. A clean value of degree d + 1 may be added to a sum of degree d.
        Not 0 of an unknown value that such a factor was multiplied into.
      uniform: for "clean", whether all elements are equal.
      zero: for "clean", whether all elements are zero.
      of_sum: for "unknown", whether it is computed from a sum over rows in a way that is not linear.
      why: for "largest", "mixed" and "unknown".
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
    def growth(self) -> int:
        """The power of n by which the value grows if all rows are equal; at 1, parts add up to the whole."""
        return self.degree + (self.kind == "sum")


CLEAN, UNIFORM, SUM = Value(kind="clean"), Value(kind="clean", uniform=True), Value(kind="sum")


def rows(axis: int, inner: int = 1) -> Value:
    return Value(kind="rows", axis=axis, inner=inner)


def unknown(why: str, *, of_sum: bool = False) -> Value:
    return Value(kind="unknown", why=why, of_sum=of_sum)


def mixed(why: str) -> Value:
    return Value(kind="mixed", why=why)


def worst(values: list[Value]) -> Value | None:
    """The first mixed value, else the first unknown one; None if there is neither."""
    bad = [value for value in values if value.kind in ("mixed", "largest", "unknown")]
    bad = sorted(bad, key=lambda value: (value.kind == "unknown", not value.of_sum))
    return bad[0].with_(kind="unknown" if bad[0].kind == "unknown" else "mixed") if bad else None


def rowwise(values: list[Value], what: str) -> Value:
    """The result of an elementwise or row-by-row operation with at least one operand of kind "rows"."""
    if any(value.kind == "sum" for value in values):
        return mixed(f"{what} of a row with a sum over rows")
    own = {(value.axis, value.inner) for value in values if value.kind == "rows"}
    if len(own) > 1:
        return mixed(f"{what} of one row with another")
    if any(value.degree for value in values):
        return unknown(f"{what} of a row with a number of rows").with_(degree=1)
    return rows(*own.pop())


def added(values: list[Value], what: str) -> Value:
    """The sum of values, or a choice between them; none is of kind "rows"."""
    values = [value for value in values if not value.zero] or values[:1]
    if len({value.growth for value in values}) > 1:
        of_sum = any(value.kind == "sum" for value in values)
        return unknown(f"{what} of a value that grows with the rows and one that does not", of_sum=of_sum)
    if any(value.kind == "sum" for value in values):
        return SUM.with_(degree=values[0].growth - 1)
    return values[0].with_(uniform=all(value.uniform for value in values))


def join(values: list[Value], what: str) -> Value:
    """What is true of any of several values: of the branches of a conditional, or the turns of a loop."""
    if len(set(values)) == 1:
        return values[0]
    return worst(values) or (rowwise if any(v.kind == "rows" for v in values) else added)(values, what)


def shift_axis(value: Value, by: int) -> Value:
    """The value after `by` leading axes were added."""
    return value.with_(axis=value.axis + by) if value.kind == "rows" else value


def drop_axes(value: Value, axes: Any) -> Value:
    """The value after these axes were removed; the axis of its rows is not among them."""
    return shift_axis(value, -sum(axis < value.axis for axis in axes))


def rank(atom: Any) -> int:
    """Number of dimensions."""
    return len(getattr(atom.aval, "shape", ()))


def long_axes(atom: Any, twin: Any) -> set[int]:
    """The axes whose size differs between a variable and its twin in the program of fewer rows."""
    sizes = zip(getattr(atom.aval, "shape", ()), getattr(twin.aval, "shape", ()), strict=True)
    return {axis for axis, (mine, theirs) in enumerate(sizes) if mine != theirs}


def unless_along(eqn: Any, twin: Any, value: Value, axes: Any) -> Value:
    """`value` for an operation along `axes`; unknown where the rows lie along one of them."""
    if value.kind == "rows" and value.axis in axes:
        return unknown(f"{eqn.primitive.name} along the axis of the rows")
    if long_axes(eqn.outvars[0], twin.outvars[0]) & set(axes):
        return unknown("what depends on the place of a row in the batch")
    return value
