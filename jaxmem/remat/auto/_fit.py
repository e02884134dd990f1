"""`fit`: choices whose compiled peak stays within a budget. The model proposes, the compiler decides."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxmem.errors import ConfigError
from jaxmem.remat.auto._assign import Assignment
from jaxmem.remat.auto._problem import Problem
from jaxmem.remat.auto._search import Fitted, Measured, Search, Trial

MAX_COMPILES = 6


def fit(
    problem: Problem,
    budget_bytes: int,
    measure: Callable[[Assignment], Measured],
    *,
    objective: str = "seconds",
    offload: bool = False,
    start_bytes: int = 0,
    max_compiles: int = MAX_COMPILES,
    earlier: Sequence[Trial] = (),
) -> Fitted:
    """Solves, compiles, corrects the model by what the compiler needed, and solves again.

    What the compiler says of a step's seconds is worth more than a model of them: with the objective "seconds", and
    where there is such an estimate, compiles that are left go to what JAX's built-in policies keep and to the solution
    that recomputes the least, as far as these are likely to stay within the budget, and the fastest is taken.

    Args:
      problem: the blocks.
      budget_bytes: for the compiled peak.
      measure: compiles a choice.
      objective, offload: as of `auto`.
      start_bytes: what the program needs besides, as far as it is known: its arguments.
      max_compiles: at most so many.
      earlier: what is known of the same problem on the same target, for whatever objective: with it, the first
        proposal is corrected already, and a larger budget never gets a worse choice.

    Raises:
      BudgetInfeasible: naming the smallest peak reached.
    """
    search = Search(problem, budget_bytes, measure, objective, offload, max_compiles, earlier)
    search.by_size(float(budget_bytes - start_bytes))
    search.hopeful()
    search.others()
    return search.result()


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
