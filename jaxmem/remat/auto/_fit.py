"""`fit`: choices whose compiled peak stays within a budget. The model proposes, the compiler decides."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem._units import format_bytes
from jaxmem.errors import BudgetInfeasible
from jaxmem.remat.auto._assign import Assignment, assign, plain, smallest, within
from jaxmem.remat.auto._problem import Problem

MAX_COMPILES = 6
_CLOSE = 0.99  # a peak of this share of the budget is not worth another compile
_STEP = 0.004  # of the budget: how far to go on where a solution is known already, and to stay below it


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What a compiler made of a choice.

    Args:
      peak_bytes: of the program.
      seconds: of a step, by the compiler's own estimate; None where it makes none.
      fresh: whether this took a compile.
    """

    peak_bytes: int
    seconds: float | None = None
    fresh: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One choice and what the compiler made of it."""

    assignment: Assignment
    peak_bytes: int
    seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """The cheapest choice that was seen to stay within the budget.

    Args:
      best: that choice.
      trials: everything that was tried, in order.
      compiles: how many of the trials were compiled now, and not remembered.
    """

    best: Trial
    trials: tuple[Trial, ...]
    compiles: int


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

    Args:
      problem: the blocks.
      budget_bytes: for the compiled peak.
      measure: compiles a choice.
      objective, offload: as of `auto`.
      start_bytes: what the program needs besides, as far as it is known: its arguments.
      max_compiles: at most so many.
      earlier: what is known of the same problem on the same target.

    Raises:
      BudgetInfeasible: naming the smallest peak reached.
    """
    trials = list(earlier)
    compiles = 0

    def known(assignment: Assignment) -> Trial | None:
        return next((t for t in trials if t.assignment.choices == assignment.choices), None)

    def attempt(assignment: Assignment) -> Trial:
        nonlocal compiles
        found = measure(assignment)
        compiles += found.fresh
        trials.append(Trial(assignment=assignment, peak_bytes=found.peak_bytes, seconds=found.seconds))
        return trials[-1]

    least = smallest(problem, objective=objective)
    room = _corrected(trials, budget_bytes) if trials else float(budget_bytes - start_bytes)
    for _ in range(4 * max_compiles):  # most of them end at a choice that is known
        proposal = within(problem, room, objective=objective, offload=offload) or least
        trial = known(proposal)
        if trial is None:
            if compiles == max_compiles:
                break
            fits = any(t.peak_bytes <= budget_bytes for t in trials)
            # The last compile is for what is sure to need the least.
            trial = attempt(least if compiles == max_compiles - 1 and not fits else proposal)
            room = _corrected(trials, budget_bytes)
        elif trial.peak_bytes <= budget_bytes:
            room += max(budget_bytes - trial.peak_bytes, _STEP * budget_bytes)
        else:
            room -= max(trial.peak_bytes - budget_bytes, _STEP * budget_bytes)
        over = trial.peak_bytes > budget_bytes
        if (trial.assignment.choices == least.choices and over) or (
            _CLOSE * budget_bytes <= trial.peak_bytes and not over
        ):
            break
        if not over and trial.assignment.price <= _cheapest(problem, objective):
            break  # no budget would buy anything better
    fitting = [t for t in trials if t.peak_bytes <= budget_bytes]
    if not fitting:
        reached = min(trials, key=lambda t: t.peak_bytes)
        raise BudgetInfeasible(
            wanted=f"a compiled peak of at most {format_bytes(budget_bytes)}",
            got=f"{format_bytes(reached.peak_bytes)} as the smallest of {len(trials)} that were compiled",
            do="Allow more bytes, or use more accumulation steps.",
        )
    best = min(fitting, key=lambda t: (t.assignment.price, t.peak_bytes))
    return Fitted(best=best, trials=tuple(trials), compiles=compiles)


def fit_budget(
    step: Any,
    budget_peak_bytes: int,
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
      The step, with `decision.peak_bytes`, `decision.compiles` and `solution()`.

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
    return step.fit_budget(budget_peak_bytes, target, offload=offload, max_compiles=max_compiles)


def _corrected(trials: list[Trial], budget_bytes: int) -> float:
    """Modelled bytes whose compiled peak should be just below the budget.

    By interpolation between the trials next to it, else by the error of the model at the nearest trial.
    """
    aim = (1 - _STEP / 2) * budget_bytes
    below = max((t for t in trials if t.peak_bytes <= budget_bytes), key=lambda t: t.peak_bytes, default=None)
    above = min((t for t in trials if t.peak_bytes > budget_bytes), key=lambda t: t.peak_bytes, default=None)
    if below is not None and above is not None and above.assignment.total_bytes > below.assignment.total_bytes:
        share = (aim - below.peak_bytes) / (above.peak_bytes - below.peak_bytes)
        low, high = below.assignment.total_bytes, above.assignment.total_bytes
        return low + max(0.0, share) * (high - low)
    nearest = min(trials, key=lambda t: abs(t.peak_bytes - aim))
    return aim - (nearest.peak_bytes - nearest.assignment.total_bytes)


def _cheapest(problem: Problem, objective: str) -> float:
    found = assign(problem, plain(problem).total_bytes * 2.0, objective=objective)
    return (found.price if found else 0.0) * (1 + 1e-6)
