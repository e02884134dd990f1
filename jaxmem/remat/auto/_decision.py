"""`Decision`: choices for the blocks of one function, and the function with them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxmem.remat.auto._apply import apply_choices
from jaxmem.remat.auto._assign import Assignment
from jaxmem.remat.auto._problem import Problem, pose, program_of
from jaxmem.remat.auto._rates import Rates
from jaxmem.remat.auto._solution import Solution, describe

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct, bool, int, float, complex)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Decision:
    """What becomes of the residuals of a function's blocks.

    Args:
      problem: the blocks.
      assignment: the choice for each.
      peak_bytes: of the program that it was made for, as compiled; None where nothing was.
      compiles: how many programs were compiled to make it.
    """

    problem: Problem
    assignment: Assignment
    peak_bytes: int | None = None
    compiles: int = 0

    def solution(self, *, budget_bytes: int | None = None, more: float | None = None) -> Solution:
        """What was decided, readable."""
        promise = "modelled" if self.peak_bytes is None else "compiled"
        made = describe(self.problem, self.assignment, budget_bytes=budget_bytes, more=more)
        return dataclasses.replace(made, promise=promise)

    def apply(self, fn: Callable) -> Callable:
        """The function that was posed, or one with the same blocks, with the choices realised."""

        def decided(*args, **kwargs):
            call = Call(fn, args, kwargs)
            return call.result(
                apply_choices(program_of(call, call.leaves), self.problem, self.assignment)(*call.leaves)
            )

        return decided


def pose_call(fn: Callable, args: tuple, kwargs: dict[str, Any], rates: Rates, argnums: Sequence[int] | None = None):
    """The problem of a call of a function of pytrees.

    Args:
      fn: the function.
      args, kwargs: arrays or `jax.ShapeDtypeStruct`s.
      rates: of the chip.
      argnums: the arguments that are differentiated; None for all.
    """
    call = Call(fn, args, kwargs)
    differentiated = None
    if argnums is not None:
        chosen = frozenset(argnums)
        marked = tuple(jax.tree.map(lambda _, i=i: i in chosen, arg) for i, arg in enumerate(args))
        differentiated = Call(fn, marked, jax.tree.map(lambda _: False, kwargs)).leaves
    return pose(program_of(call, call.leaves, differentiated), rates)


class Call:
    """A call of a function of pytrees, as a function of its flat arrays."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict[str, Any]):
        self._all, self._tree = jax.tree.flatten((args, kwargs))
        self._fn = fn
        self._is_array = [isinstance(x, _ARRAYS) for x in self._all]
        self._numbers: list = []
        self._out_tree: Any = None
        self.leaves = [x for x, yes in zip(self._all, self._is_array, strict=True) if yes]

    def __call__(self, *arrays) -> list:
        given = iter(arrays)
        leaves = [next(given) if yes else x for x, yes in zip(self._all, self._is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        outs, self._out_tree = jax.tree.flatten(self._fn(*args, **kwargs))
        # Python numbers stay what they are.
        self._numbers = [x if isinstance(x, (bool, int, float, complex)) else None for x in outs]
        return [x for x, number in zip(outs, self._numbers, strict=True) if number is None]

    def result(self, outs: list) -> Any:
        """The outputs as the function returns them."""
        arrays = iter(outs)
        return self._out_tree.unflatten([next(arrays) if n is None else n for n in self._numbers])
