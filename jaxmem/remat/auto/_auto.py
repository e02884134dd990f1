"""`auto` and `fit_budget`: a differentiable function, or a training step, under a budget of bytes."""

import functools
from collections.abc import Callable
from typing import Any

from jaxmem._shown import name_of, one_line
from jaxmem.budget import Budget, parse_budget
from jaxmem.errors import ConfigError
from jaxmem.remat.auto._assignment import Assignment
from jaxmem.remat.auto._problem import Problem, build_problem
from jaxmem.remat.auto._rates import Rates
from jaxmem.remat.auto._residual_plan import ResidualPlan
from jaxmem.remat.auto._search import MAX_COMPILES
from jaxmem.remat.auto._solution import Solution
from jaxmem.remat.auto._within import within_bytes, within_share
from jaxmem.targets import Target, resolve_target


class Auto:
    """A function under a budget, made by `auto`; called like the function."""

    def __init__(self, fn: Callable, budget: Budget, rates: Rates, objective: str, offload: bool):
        self._fn, self._budget, self._rates = fn, budget, rates
        self._objective, self._offload = objective, offload
        functools.update_wrapper(self, fn, updated=())

    def __repr__(self) -> str:
        return one_line("Auto", [("", name_of(self._fn)), ("budget", str(self._budget)), ("by", self._objective)])

    def __call__(self, *args, **kwargs):
        return self.decide(*args, **kwargs).apply(self._fn)(*args, **kwargs)

    def decide(self, *args, **kwargs) -> ResidualPlan:
        """The choices for these arguments, arrays or `jax.ShapeDtypeStruct`s.

        Raises:
          BudgetInfeasible: keeping the inputs of blocks alone exceeds the budget or the share.
        """
        problem = build_problem(self._fn, args, kwargs, self._rates)
        return ResidualPlan(problem=problem, assignment=self._assign(problem))

    def solve(self, *args, **kwargs) -> Solution:
        """What `decide` chooses, readable."""
        made = self.decide(*args, **kwargs)
        more = self._more(made.problem, made.assignment)
        return made.solution(budget_bytes=self._budget.bytes, more=more)

    def _assign(self, problem: Problem, extra: int = 0) -> Assignment:
        options = {"objective": self._objective, "offload": self._offload}
        if self._budget.share is not None:
            return within_share(problem, self._budget.share, **options)
        return within_bytes(problem, (self._budget.bytes or 0) + extra, **options)

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
      ConfigError: for an invalid budget or objective. When called, BudgetInfeasible: no choice stays within the budget.

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


def fit_budget(
    step: Any,
    budget_peak_bytes: int | str,
    target: Any = None,
    *,
    offload: bool = False,
    max_compiles: int = MAX_COMPILES,
) -> Any:
    """A training step whose compiled peak is at most a budget, at the lowest price that was found.

    Args:
      step: of `jaxmem.make_train_step`; its own remat setting is replaced.
      budget_peak_bytes: per device, for the peak of the whole step as the target's compiler reports it.
      target: what to compile for; the step's own where None.
      offload: whether values may wait in host memory.
      max_compiles: of the target's compiler. Peaks are remembered on disk by the program's content, in
        JAXMEM_CACHE_DIR or the user's cache folder.

    Returns:
      The step, with `decision.peak_bytes`, `decision.compiles` and `solution()`. What was compiled for a step helps
      its later budgets, also those of the returned step: a larger one never gets a worse choice than a smaller before.

    Raises:
      BudgetInfeasible: naming the smallest peak reached.

    >>> import jax, jax.numpy as jnp, optax
    >>> from jaxmem import Workload, make_train_step
    >>> def loss(weights, x):
    ...     return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(jnp.tanh(x) @ w), None), x, weights)[0])
    >>> shapes = jax.ShapeDtypeStruct((8, 64, 64), "float32"), jax.ShapeDtypeStruct((512, 64), "float32")
    >>> step = fit_budget(make_train_step(Workload(loss, *shapes, optax.sgd(0.1))), 2_500_000, "cpu")
    >>> step.report().peak_bytes <= 2_500_000
    True
    """
    if not hasattr(step, "fit_budget"):
        raise ConfigError(
            wanted="a step made by jaxmem.make_train_step",
            got=f"a {type(step).__name__}",
            do="For a function use auto.",
        )
    return step.fit_budget(budget_peak_bytes, target, offload=offload, max_compiles=max_compiles)


def check_function(fn) -> None:
    """ConfigError for what is no function of arrays: steps have `fit_budget`."""
    if not callable(fn) or hasattr(fn, "fit_budget"):
        raise ConfigError(
            wanted="a differentiable function of arrays, such as a loss",
            got=f"a {type(fn).__name__}",
            do='For a workload or a step use MemoryConfig(remat="auto:6GiB") or remat.fit_budget.',
        )


def check_objective(objective: str) -> None:
    """ConfigError for an unknown objective."""
    if objective not in ("seconds", "flops"):
        raise ConfigError(wanted='objective to be "seconds" or "flops"', got=repr(objective), do="Choose one of them.")
