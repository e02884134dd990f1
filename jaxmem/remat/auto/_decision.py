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
from jaxmem.targets import in_mesh, mesh_of

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False, repr=False)
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

    def __repr__(self) -> str:
        known = f"{self.peak_bytes:,} bytes, {self.compiles} compiles" if self.peak_bytes else "modelled"
        return f"Decision({len(self.assignment.choices)} blocks, peak {known})"

    def solution(self, *, budget_bytes: int | None = None, more: float | None = None) -> Solution:
        """What was decided, readable."""
        return describe(self.problem, self.assignment, budget_bytes=budget_bytes, more=more, peak_bytes=self.peak_bytes)

    def apply(self, fn: Callable) -> Callable:
        """The function that was posed, or one with the same blocks, with the choices realised."""

        def decided(*args, **kwargs):
            call = Call(fn, args, kwargs)
            program = program_of(call, call.leaves)
            return call.result(apply_choices(program, self.problem, self.assignment)(*program.consts, *call.leaves))

        return decided


def pose_call(
    fn: Callable,
    args: tuple,
    kwargs: dict[str, Any],
    rates: Rates,
    argnums: Sequence[int] | None = None,
    shards: int = 1,
) -> Problem:
    """The problem of a call of a function of pytrees.

    Args:
      fn: the function.
      args, kwargs: arrays or `jax.ShapeDtypeStruct`s.
      rates: of the chip.
      argnums: the arguments that are differentiated; None for all.
      shards: as of `pose`.
    """
    call = Call(fn, args, kwargs)
    differentiated = None
    if argnums is not None:
        chosen = frozenset(argnums)
        marked = tuple(jax.tree.map(lambda _, i=i: i in chosen, arg) for i, arg in enumerate(args))
        differentiated = call.arrays_of((marked, jax.tree.map(lambda _: False, kwargs)))
    with in_mesh(mesh_of(mixed=True, arguments=(args, kwargs)), args, kwargs):
        return pose(program_of(call, call.leaves, differentiated), rates, shards)


class Call:
    """A call of a function of pytrees, as a function of its flat arrays."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict[str, Any]):
        self._all, self._tree = jax.tree.flatten((args, kwargs))
        self._fn = fn
        # Python numbers and strings are the function's own business: it may branch on them.
        self._is_array = [isinstance(x, _ARRAYS) for x in self._all]
        self._fixed: list = []
        self._out_tree: Any = None
        self.leaves = self.arrays_of((args, kwargs))

    def arrays_of(self, tree) -> list:
        """The leaves of a tree like that of the arguments, where the arguments are arrays."""
        return [x for x, yes in zip(jax.tree.leaves(tree), self._is_array, strict=True) if yes]

    def __call__(self, *arrays) -> list:
        given = iter(arrays)
        leaves = [next(given) if yes else x for x, yes in zip(self._all, self._is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        outs, self._out_tree = jax.tree.flatten(self._fn(*args, **kwargs))
        self._fixed = [(not isinstance(x, _ARRAYS), x) for x in outs]
        return [x for (fixed, _), x in zip(self._fixed, outs, strict=True) if not fixed]

    def result(self, outs: list) -> Any:
        """The outputs as the function returns them; Python numbers among them are what they were."""
        arrays = iter(outs)
        return self._out_tree.unflatten([x if fixed else next(arrays) for fixed, x in self._fixed])
