"""`fit`: choices whose compiled peak stays within a budget. The model proposes, the compiler decides."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from jaxmem._units import format_apart
from jaxmem.errors import BudgetInfeasible
from jaxmem.remat.auto._assignment import Assignment, assigned, leasts, plain, repriced
from jaxmem.remat.auto._learnt import fitted, quickest
from jaxmem.remat.auto._levels import most_promising, smallest_levels
from jaxmem.remat.auto._problem import Problem
from jaxmem.remat.auto._trial import SAME_PRICE, Fitted, Measured, Trial, alike, room_for
from jaxmem.remat.auto._within import assign, proven, within

MAX_COMPILES = 6
REFUSED = 2**63  # the peak of a choice that JAX or the compiler refuses: over every budget
# Shares of the budget, but for _BARGAIN, which is a share of a price. What each earns was seen against made-up
# compilers, whose peaks differ from the model's value by value.
_CLOSE = 0.99  # above this peak the search by size ends; without it there are 2 % more compiles
_MARGIN = 0.002  # how far below the budget to aim
# A peak up to this may come below the budget by another choice of the same price; without it one budget of 30 is 14
# times as dear.
_NEAR = 1.02
_LEFT = 0.97  # while all peaks that fit are below this, choices that the model puts over the budget are tried,
_HOPES = (0.0, 0.03, 0.06, 0.1)  # by so much over it; without them 4 budgets of 40 are dearer, one twice as dear
_BARGAIN = 0.95  # else one more is tried, if its price is below this share of the best,
_HARDLY = (0.005, 0.01, 0.015, 0.02)  # and it is so much over the budget


class Search:
    """The trials so far, and what to try next."""

    def __init__(
        self,
        problem: Problem,
        budget_bytes: int,
        measure: Callable[[Assignment], Measured],
        objective: str,
        offload: bool,
        max_compiles: int,
        earlier: Sequence[Trial],
    ):
        self.modelled, self.budget_bytes, self.measure = problem, budget_bytes, measure
        self.objective, self.offload, self.max_compiles = objective, offload, max_compiles
        self.problem, self.trials = problem, list(earlier)
        self.price()
        self.compiles = self.attempts = 0
        self.last = [name for name, at in problem.group_of.items() if problem.groups[at].last]
        self.end = "everything"

    def price(self) -> None:
        """Prices everything by what is known of the compiler's rates."""
        known = quickest(t.forward for t in self.trials) if self.objective == "seconds" else ()
        self.problem = fitted(self.modelled, known) if known else self.modelled
        self.trials = [dataclasses.replace(t, assignment=self.priced(t.assignment)) for t in self.trials]
        for name in ("leasts", "cheapest"):
            self.__dict__.pop(name, None)

    def priced(self, assignment: Assignment) -> Assignment:
        return repriced(self.problem, assignment, objective=self.objective)

    @functools.cached_property
    def leasts(self) -> dict[str, Assignment]:
        return leasts(self.problem, self.objective)

    @property
    def similar(self) -> list[Trial]:
        """The trials whose last block keeps as much: where it keeps another share, the model has another error."""
        return [t for t in self.trials if self.end_of(t.assignment) == self.end]

    def end_of(self, assignment: Assignment) -> str | None:
        """What its last block keeps."""
        for end, least in self.leasts.items():
            if all(assignment.choices[name] == least.choices[name] for name in self.last):
                return end
        return None

    @functools.cached_property
    def cheapest(self) -> float:
        """The price without a budget, the lowest there is."""
        room = plain(self.problem).total_bytes * 2.0
        found = assign(self.problem, room, objective=self.objective, offload=self.offload)
        return (found.price if found else 0.0) * (1 + 1e-6)

    @property
    def over(self) -> list[Assignment]:
        return [t.assignment for t in self.trials if t.peak_bytes > self.budget_bytes]

    @property
    def fitting(self) -> list[Trial]:
        return [t for t in self.trials if t.peak_bytes <= self.budget_bytes]

    @property
    def best(self) -> Trial:
        """The cheapest that fits."""
        return min(self.fitting, key=lambda t: t.assignment.price)

    def known(self, assignment: Assignment) -> Trial | None:
        """A trial of the same choices, or of such as compile to nearly the same program."""
        same = lambda t: alike(self.problem, t.assignment, assignment, _MARGIN * self.budget_bytes)  # noqa: E731
        return next(filter(same, self.trials), None)

    @property
    def options(self) -> dict[str, Any]:
        """Of what solves."""
        return {"objective": self.objective, "offload": self.offload, "end": self.end}

    def attempt(self, assignment: Assignment) -> Trial:
        found = self.measure(assignment)
        self.attempts += 1  # remembered or not, so that what is chosen does not depend on what is remembered
        self.compiles += found.fresh
        self.trials.append(found.trial(assignment))
        if found.forward:
            self.price()
        return self.trials[-1]

    def run(self, room: float) -> Fitted:
        """Tries choices that leave the last block as it is written, then what that may keep instead, then the rest."""
        self.by_size(room)
        for end in list(self.leasts)[1:]:
            # Where something fits, the last block's products are not worth running again.
            found = self.fitting and (end == "inputs" or self.best.assignment.price <= self.cheapest)
            if found or self.attempts == self.max_compiles:
                break
            self.end, start = end, self.leasts[end]
            if self.fitting:
                kept = {name: start.choices[name] for name in self.last}
                start = assigned(self.problem, self.best.assignment.choices | kept, objective=self.objective)
            if not self.similar:
                self.attempt(start)
            self.by_size(room)
        self.end = (self.end_of(self.best.assignment) if self.fitting else None) or "everything"
        self.hopeful()
        self.others()
        return self.result()

    def by_size(self, room: float) -> None:
        """Tries the cheapest choices by the model, whose bytes are corrected by each trial."""
        ceiling = float("inf")
        while self.attempts < self.max_compiles:
            least = self.leasts[self.end]
            if self.similar:
                room = min(self.corrected(), ceiling)
            found = within(self.problem, room, **self.options)
            untried = [] if self.fitting else [each for each in self.leasts.values() if self.known(each) is None]
            # The last compiles are for what needs the least, and for segments.
            if found is None or (untried and self.max_compiles - self.attempts <= len(untried) + 1):
                found = least
            others = [t.assignment.price for t in self.fitting if self.end_of(t.assignment) != self.end]
            if found.price >= (1 - SAME_PRICE) * min(others, default=float("inf")):
                break
            trial = self.known(found)
            if trial is not None:
                if trial.peak_bytes <= self.budget_bytes or found is least:
                    break
                ceiling = trial.assignment.total_bytes - _MARGIN * self.budget_bytes
                continue
            trial = self.attempt(found)
            if self.budget_bytes < trial.peak_bytes <= _NEAR * self.budget_bytes:
                trial = self.rival(trial) or trial
            if trial.peak_bytes > self.budget_bytes:
                continue
            if trial.peak_bytes >= _CLOSE * self.budget_bytes or trial.assignment.price <= self.cheapest:
                break

    def hopeful(self) -> None:
        """Tries choices over the budget by the model, where much of it is left or the price would be much lower.

        The model may overestimate choices unlike those tried so far.
        """
        while self.fitting and self.attempts < self.max_compiles:
            most = max(t.peak_bytes for t in self.fitting)
            best = self.best.assignment.price
            left = most < _LEFT * self.budget_bytes
            if best <= self.cheapest:
                return
            found = self.cheaper(best * (1 - SAME_PRICE), _HOPES) if left else self.cheaper(_BARGAIN * best, _HARDLY)
            if found is None or self.known(found) is not None:
                return
            self.attempt(found)
            if not left:
                return

    def cheaper(self, price: float, hopes: Sequence[float]) -> Assignment | None:
        """A choice below a price, as little over the budget by the model as possible.

        It recomputes other equations than the choices that were too large.
        """
        least_error = min(t.peak_bytes - t.assignment.total_bytes for t in self.similar or self.trials)
        for more in hopes:
            room = (1 - _MARGIN + more) * self.budget_bytes - least_error
            found = assign(self.problem, room, unlike=self.over, **self.options)
            if found is not None and found.price < price:
                return found
        return None

    def rival(self, trial: Trial) -> Trial | None:
        """Tries another choice of the price of one that was just too large: the model is not exact to a per cent."""
        room = trial.assignment.total_bytes + (_NEAR - 1) * self.budget_bytes
        found = assign(self.problem, room, without=self.over, **self.options)
        # One compile stays for what is smaller by the model.
        if found is None or self.attempts >= self.max_compiles - 1 or self.known(found) is not None:
            return None
        return self.attempt(found) if found.price <= trial.assignment.price * (1 + SAME_PRICE) else None

    def others(self) -> None:
        """Tries choices that the model does not prefer, but the compiler may."""
        tried = [t for t in map(self.known, self.leasts.values()) if t is not None]
        least = min(tried, key=lambda t: t.peak_bytes).assignment if tried else None
        for assignment in () if self.fitting else smallest_levels(self.problem, least, self.objective):
            if self.fitting or self.attempts == self.max_compiles:
                break
            if self.known(assignment) is None:
                self.attempt(assignment)
        while self.fitting and self.attempts < self.max_compiles:
            found = self.promising()
            if found is None:
                break
            self.attempt(found)

    def promising(self) -> Assignment | None:
        """The choice that is likely to fit and by which the most seconds are expected to be gained; None if few are."""
        if self.objective != "seconds" or any(t.seconds is None for t in self.fitting):
            return None
        room = self.corrected()
        flops: dict[str, Any] = self.options | {"objective": "flops"}
        solved = within(self.problem, room, **self.options), within(self.problem, room, **flops)
        proposed = [self.priced(each) for each in solved if each]
        fastest = min(self.fitting, key=lambda t: t.seconds or 0.0)
        last = self.attempts == self.max_compiles - 1
        return most_promising(self.problem, self.trials, fastest, proposed, room, last=last)

    def corrected(self) -> float:
        """Modelled bytes whose compiled peak should be just below the budget."""
        return room_for((1 - _MARGIN) * self.budget_bytes, self.similar or self.trials)

    def result(self) -> Fitted:
        """The best of what fits."""
        fitting = self.fitting
        if not fitting:
            reached = min(t.peak_bytes for t in self.trials)
            wanted, got = format_apart(self.budget_bytes, reached)
            raise BudgetInfeasible(
                wanted=f"a compiled peak of at most {wanted}",
                got=f"{got} as the smallest of {len(self.trials)} that were compiled",
                do="Allow more bytes, or use more accumulation steps.",
            )
        by_seconds = self.objective == "seconds" and all(t.seconds is not None for t in fitting)
        worth = lambda t: (t.seconds if by_seconds else t.assignment.price, t.peak_bytes)  # noqa: E731
        best = min(fitting, key=worth)
        if self.problem is not self.modelled:  # what is said of a choice is by the model's own rates
            shown = proven(self.modelled, best.assignment, objective=self.objective, offload=self.offload)
            best = dataclasses.replace(best, assignment=shown)
        return Fitted(best=best, trials=tuple(self.trials), compiles=self.compiles)


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

    With the objective "seconds" the compiler's own estimate of a step's seconds decides, where it makes one. Then the
    model's rates are fitted to it after each compile, and the compiles that are left go where the most seconds are
    expected to be gained: to cheaper choices by those rates, to what JAX's built-in policies keep, and to other levels
    of memory, as far as these are likely to stay within the budget. The fastest is taken.

    Args:
      problem: the blocks.
      budget_bytes: for the compiled peak.
      measure: compiles a choice.
      objective, offload: as of `auto`.
      start_bytes: what the program needs besides, as far as it is known: its arguments.
      max_compiles: at most so many.
      earlier: trials of the same problem on the same target, for any objective. They correct the first proposal, and
        with them a larger budget never gets a worse choice.

    Raises:
      BudgetInfeasible: naming the smallest peak reached.
    """
    search = Search(problem, budget_bytes, measure, objective, offload, max_compiles, earlier)
    return search.run(float(budget_bytes - start_bytes))
