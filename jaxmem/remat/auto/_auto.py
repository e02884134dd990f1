"""`auto`: any differentiable function under a budget of bytes, without annotations."""

import functools
from collections.abc import Callable

from jaxmem._units import format_apart, format_bytes
from jaxmem.budget import Budget, parse_budget
from jaxmem.errors import BudgetInfeasible
from jaxmem.remat.auto._assign import Assignment, smallest, within
from jaxmem.remat.auto._candidates import check_function, check_objective
from jaxmem.remat.auto._decision import Decision, pose_call
from jaxmem.remat.auto._nested import nested
from jaxmem.remat.auto._problem import Problem
from jaxmem.remat.auto._rates import Rates
from jaxmem.remat.auto._share import within_share
from jaxmem.remat.auto._solution import Solution, in_the_way
from jaxmem.targets import Target, resolve_target


class Auto:
    """A function under a budget, made by `auto`; called like the function."""

    def __init__(self, fn: Callable, budget: Budget, rates: Rates, objective: str, offload: bool):
        self._fn, self._budget, self._rates = fn, budget, rates
        self._objective, self._offload = objective, offload
        functools.update_wrapper(self, fn, updated=())

    def __call__(self, *args, **kwargs):
        return self.decide(*args, **kwargs).apply(self._fn)(*args, **kwargs)

    def decide(self, *args, **kwargs) -> Decision:
        """The choices for these arguments, arrays or `jax.ShapeDtypeStruct`s.

        Raises:
          BudgetInfeasible: not even keeping nothing but the inputs of blocks stays within the budget or the share.
        """
        problem = pose_call(self._fn, args, kwargs, self._rates)
        return Decision(problem=problem, assignment=self._assign(problem))

    def solve(self, *args, **kwargs) -> Solution:
        """What `decide` chooses, readable."""
        made = self.decide(*args, **kwargs)
        more = self._more(made.problem, made.assignment)
        return made.solution(budget_bytes=self._budget.bytes, more=more)

    def _assign(self, problem: Problem, extra: int = 0) -> Assignment:
        options = {"objective": self._objective, "offload": self._offload}
        if self._budget.share is not None:
            return within_share(problem, self._budget.share, **options)
        size = (self._budget.bytes or 0) + extra
        found = within(problem, size, **options)
        if found is not None:
            return found
        segments = nested(problem, objective=self._objective)
        if segments is not None and segments.total_bytes <= size:
            return segments
        least = smallest(problem, objective=self._objective)
        if least.total_bytes <= size:  # the solver ran out of time
            return least
        least = segments or least
        wanted, got = format_apart(size, least.total_bytes)
        raise BudgetInfeasible(
            wanted=f"residuals and a working set within {wanted}",
            got=f"at least {got}: {format_bytes(least.kept_bytes)} of what blocks are "
            f"given and what is kept outside of them, and a working set of {format_bytes(least.working_bytes)}; the "
            f"largest are {in_the_way(problem, least)}",
            do="Allow more bytes, or cut the batch into micro-batches.",
        )

    def _more(self, problem: Problem, now: Assignment) -> float | None:
        if self._budget.bytes is None:
            return None
        return max(0.0, now.recompute_seconds - self._assign(problem, 2**30).recompute_seconds)


def auto(
    fn: Callable,
    budget: int | float | str,
    *,
    target: str | Target | None = None,
    objective: str = "seconds",
    offload: bool = False,
) -> Auto:
    """`fn` with its residuals chosen under a budget: kept, recomputed or offloaded, value by value.

    Blocks are found as `jaxmem.remat.blocks` finds them: bodies of scans, repeated modules, repeated structure. A
    function in which nothing repeats is one block. Forward-mode differentiation of the result is not supported.

    Args:
      fn: function of pytrees of arrays, differentiable in reverse.
      budget: bytes (an int, "6GiB") that bound what one call keeps for its backward pass plus the largest working set
        of a block, modelled; or a share below 1 of what `fn` keeps without remat, working sets aside; 0 is full
        rematerialisation: blocks keep their inputs.
      target: whose speed is priced, such as "tpu-v5e:1x1"; an H100's where None.
      objective: "seconds", by a roofline that also prices keeping, or "flops" of products and kernels.
      offload: whether values may wait in host memory. TPUs and GPUs have it.

    Raises:
      ConfigError: for a budget or objective that is none. When called, BudgetInfeasible: no choice stays within.

    >>> import jax, jax.numpy as jnp
    >>> def loss(weights, x):
    ...     for w in weights:
    ...         x = jnp.tanh(jnp.tanh(x) @ w)
    ...     return x.sum()
    >>> x = jnp.ones((8, 8))
    >>> small = auto(loss, 1600)
    >>> bool(jnp.allclose(jax.grad(small)([x] * 3, x)[0], jax.grad(loss)([x] * 3, x)[0]))
    True
    >>> small.solve([x] * 3, x).kept_bytes < auto(loss, 4000).solve([x] * 3, x).kept_bytes
    True
    """
    check_function(fn)
    check_objective(objective)
    rates = Rates.of(None if target is None else resolve_target(target))
    return Auto(fn, parse_budget(budget), rates, objective, offload)
