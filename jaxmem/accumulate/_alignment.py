"""How a value in a loss depends on the rows of its batch."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Alignment:
    """What is known of one value of a program.

    Args:
      kind: "clean", no row in it; "rows", along `axis` each index belongs to one row and depends on that only; "sum",
        a sum over rows of what depends on one each; "mixed", something of one row and of others; "unknown".
      axis: of "rows".
      inner: of "rows": how many neighbours along `axis` belong to the same row.
      constant: of "clean": the axes along which it is the same everywhere.
      zero: of "clean": whether it is zero.
      pure: of "sum": whether nothing was added that is of no row.
      degree: of "clean" and "sum": the power of the number of rows by which its factors grow: 1 for `x.size`,
        -1 for the factor in a mean.
      why: of "mixed" and "unknown".
    """

    kind: str
    axis: int = -1
    inner: int = 1
    constant: frozenset[int] = frozenset()
    zero: bool = False
    pure: bool = True
    degree: int = 0
    why: str = ""

    def with_(self, **fields: Any) -> "Alignment":
        return dataclasses.replace(self, **fields)


def clean(constant=(), *, zero: bool = False, degree: int = 0) -> Alignment:
    return Alignment(kind="clean", constant=frozenset(constant), zero=zero, degree=degree)


def rows(axis: int, inner: int = 1) -> Alignment:
    return Alignment(kind="rows", axis=axis, inner=inner)


def unknown(why: str) -> Alignment:
    return Alignment(kind="unknown", why=why)


def mixed(why: str) -> Alignment:
    return Alignment(kind="mixed", why=why)


SUM = Alignment(kind="sum")


def worst(values: list[Alignment]) -> Alignment | None:
    """The first that is mixed, else unknown; None where all are better."""
    for kind in ("mixed", "unknown"):
        for value in values:
            if value.kind == kind:
                return value
    return None


def together(values: list[Alignment], ranks: list[int], what: str) -> Alignment:
    """Of an operation on each element of its operands, which is linear in none of them."""
    bad = worst(values)
    if bad is not None:
        return bad
    kinds = {value.kind for value in values}
    if "rows" not in kinds:
        if "sum" in kinds:
            return unknown(f"{what} of a sum over rows is linear in no row")
        full = [v.constant for v, rank in zip(values, ranks, strict=True) if rank]
        degrees = {value.degree for value in values}
        if degrees != {0}:
            return unknown(f"{what} of a number of rows")
        return clean(frozenset.intersection(*full) if full else ())
    if "sum" in kinds:
        return mixed(f"{what} of a row with a sum over rows")
    first = next(value for value in values if value.kind == "rows")
    for value, rank in zip(values, ranks, strict=True):
        if value.kind == "rows" and (value.axis, value.inner) != (first.axis, first.inner):
            return mixed(f"{what} of one row with another")
        if value.degree:
            return unknown(f"{what} of a row with a number of rows")
        if value.kind == "clean" and rank and first.axis not in value.constant:
            return unknown(f"{what} of a row with what depends on its place in the batch")
    return first


def joined(first: Alignment, second: Alignment) -> Alignment:
    """Either of two: the branches of a conditional, or the turns of a loop."""
    if first == second:
        return first
    bad = worst([first, second])
    if bad is not None:
        return bad
    for one, other in ((first, second), (second, first)):
        if one.kind == "clean" and other.kind == "clean" and one.degree == other.degree:
            return clean(one.constant & other.constant, degree=one.degree)
        if one.kind != "clean":
            continue
        if other.kind == "rows" and other.axis in one.constant:
            return other
        if other.kind == "sum" and one.zero:
            return other
        if other.kind == "sum" and one.degree == 0:
            return other.with_(pure=False)
    if first.kind == second.kind == "sum" and first.degree == second.degree:
        return first.with_(pure=first.pure and second.pure)
    return unknown("a value that a loop or a conditional makes in ways that depend differently on the rows")


def joined_sum(left: Alignment, right: Alignment) -> Alignment:
    """Of a sum or difference of two, of which one is a sum over rows."""
    if left.kind == "clean" and left.zero:
        return right
    if left.kind == right.kind:
        same = left.degree == right.degree
        return left.with_(pure=left.pure and right.pure) if same else unknown("a sum of means and sums over rows")
    own, other = (left, right) if left.kind == "sum" else (right, left)
    return own.with_(pure=False) if other.degree == 0 else unknown("a sum with a number of rows")


def all_joined(values: list[Alignment]) -> Alignment:
    """Any of several."""
    found = values[0]
    for value in values[1:]:
        found = joined(found, value)
    return found


def without(value: Alignment, axes: Any) -> Alignment:
    """Of the value without those axes, none of which is that of the rows."""
    fewer = lambda axis: axis - sum(gone < axis for gone in axes)  # noqa: E731
    constant = frozenset(fewer(axis) for axis in value.constant if axis not in axes)
    value = value.with_(constant=constant)
    return value.with_(axis=fewer(value.axis)) if value.kind == "rows" else value


def stacked(value: Alignment) -> Alignment:
    """Of the values of a loop's turns, along a new first axis."""
    value = value.with_(constant=frozenset(axis + 1 for axis in value.constant))
    return value.with_(axis=value.axis + 1) if value.kind == "rows" else value
