"""What each output of a loss is to the rows of its batch: a mean, a sum, a value a row."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.accumulate.separability._interpreter import RowInterpreter
from jaxmem.accumulate.separability._row_values import CLEAN, Value, long_axes, rows
from jaxmem.accumulate.separability._rules import RULES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Output:
    """What one output is to the rows.

    Args:
      kind: "mean", "sum", "max", "same" (no row changes it), "rows" (a value, or several, for each row); "nonlinear"
        (computed from a sum over rows, as a quotient of two), "mixed" (one row with another) or "unknown".
      axis, inner: of "rows", the axis along which rows lie, and how many neighbours along it belong to one row.
      why: of "nonlinear", "mixed" and "unknown".
    """

    kind: str
    axis: int = -1
    inner: int = 1
    why: str = ""


def outputs_by_rows(
    fn: Callable[..., list], batch: Any, axes: tuple[int | None, ...], rest: Any, values: Callable[[], int]
) -> list[Output]:
    """What each output of a function is to the rows of its batch, by abstract evaluation; nothing is computed.

    A random mask is taken as a part of its row. Where the loss itself mixes rows, as that of a
    model with BatchNorm does, the rows that were mixed are followed as if each stood for itself.

    Args:
      fn: (batch, rest) -> a flat list of arrays.
      batch: arrays or shapes, of any number of rows.
      axes: the example axis of each leaf of the batch, None leaves included; None for a leaf without rows.
      rest: a pytree of arrays that do not depend on rows.
      values: called once it is traced: how many of the outputs, the first ones, are the loss.
    """
    sized = [x.shape[axis] for x, axis in zip(_leaves(batch), axes, strict=True) if axis is not None]
    part = max(2, sized[0])  # an axis of size 1 is squeezed and broadcast like no other
    try:
        twins = [jax.make_jaxpr(fn)(_resized(batch, axes, size), rest) for size in (2 * part, part)]
    except Exception:  # the loss takes this number of rows only
        shapes = jax.eval_shape(fn, batch, rest)
        return [Output(kind="unknown", why="the loss cannot be traced on another number of rows")] * len(shapes)
    pairs = zip(_leaves(batch), axes, strict=True)
    given = [CLEAN if axis is None else rows(axis) for leaf, axis in pairs if leaf is not None]
    given += [CLEAN] * len(jax.tree.leaves(rest))
    whole, half = twins
    found = RowInterpreter(2, _RULES).outputs(whole, half, given)
    if any(value.kind in ("mixed", "unknown") and not value.of_sum for value in found[: values()]):
        loose = _Loose(2, _LOOSE_RULES, 2 * part).outputs(whole, half, given)
        found = [b if a.kind in ("mixed", "unknown") else a for a, b in zip(found, loose, strict=True)]
    variables = zip(whole.jaxpr.outvars, half.jaxpr.outvars, strict=True)
    return [_output(value, *each, 2 * part) for value, each in zip(found, variables, strict=True)]


def _output(value: Value, out, its_twin, size: int) -> Output:
    long = [axis for axis in long_axes(out, its_twin) if axis != value.axis]
    if value.kind == "clean" and not value.degree and len(long) == 1 and not out.aval.shape[long[0]] % size:
        # Equal along it, such as jnp.ones(len(x)).
        return Output(kind="rows", axis=long[0], inner=out.aval.shape[long[0]] // size)
    if long and value.kind not in ("mixed", "unknown"):
        return Output(kind="mixed", why="a shape that grows with the number of rows")
    if value.kind == "rows" and not value.degree:
        return Output(kind="rows", axis=value.axis, inner=value.inner)
    if value.kind == "largest":
        return Output(kind="max")
    if value.kind == "sum" and value.growth in (0, 1):
        return Output(kind="sum" if value.growth else "mean")
    if value.kind == "clean" and value.degree in (0, 1):
        return Output(kind="sum" if value.degree else "same")
    if value.kind in ("mixed", "unknown") and not value.of_sum:
        return Output(kind=value.kind, why=value.why)
    return Output(kind="nonlinear", why=value.why or "it grows with the number of rows in its own way")


class _Loose(RowInterpreter):
    """An interpreter that takes what it cannot follow as a value of each row, where its shape says so."""

    def __init__(self, ratio: int, rules: dict, size: int):
        super().__init__(ratio, rules)
        self._size = size

    def outputs(self, whole, part, given):
        found = super().outputs(whole, part, given)
        return [self._loosened(*each) for each in zip(found, whole.jaxpr.outvars, part.jaxpr.outvars, strict=True)]

    def _equation(self, eqn, twin, values):
        found = super()._equation(eqn, twin, values)
        found = found if isinstance(found, list) else [found] * len(eqn.outvars)
        return [self._loosened(*each) for each in zip(found, eqn.outvars, twin.outvars, strict=True)]

    def _loosened(self, value: Value, out, its_twin) -> Value:
        follows = value.kind in ("mixed", "unknown") and not value.degree  # a lost factor would make a mean a sum
        axes = long_axes(out, its_twin) if follows else ()
        fits = [axis for axis in axes if out.aval.shape[axis] == self._size]
        return rows(fits[0]) if len(axes) == len(fits) == 1 else value


def _drawn(eqn, twin, values) -> Value | list[Value]:
    """Random bits: each row's are its own, if one axis counts rows."""
    axes = long_axes(eqn.outvars[0], twin.outvars[0])
    return rows(*axes) if len(axes) == 1 else CLEAN if not axes else Value(kind="unknown", why="random numbers")


def _extreme(eqn, twin, values) -> Value | list[Value]:
    """The least or largest of all rows: linear in no row, unlike what `_Loose` makes of a row beside it."""
    value = RULES[eqn.primitive.name](eqn, twin, values)
    return value.with_(of_sum=True) if value.kind in ("mixed", "largest") else value


_RULES = RULES | {"random_bits": _drawn, "bitcast_convert_type": RULES["reduce_precision"]}
_LOOSE_RULES = _RULES | dict.fromkeys(("reduce_max", "reduce_min", "reduce_prod"), _extreme)


def _leaves(batch: Any) -> list:
    return jax.tree.leaves(batch, is_leaf=lambda x: x is None)


def _resized(batch: Any, axes: tuple[int | None, ...], size: int) -> Any:
    """Shapes of a batch with `size` rows."""

    def resized(leaf, axis):
        if leaf is None or axis is None:
            return leaf
        shape = (*leaf.shape[:axis], size, *leaf.shape[axis + 1 :])
        return jax.ShapeDtypeStruct(shape, jnp.result_type(leaf))

    leaves, tree = jax.tree.flatten(batch, is_leaf=lambda x: x is None)
    return tree.unflatten(map(resized, leaves, axes))
