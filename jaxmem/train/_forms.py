"""A remat budget, spent in the form of a step that is best within it: order, roll and masks, where they are open."""

import dataclasses
import logging

from jaxmem._blame import is_own_fault
from jaxmem._settled import Settled
from jaxmem.errors import BudgetInfeasible
from jaxmem.remat.auto import MAX_COMPILES, ResidualPlan, Trial, within_share
from jaxmem.targets import Target, resolve_target
from jaxmem.train._budget import Trials, spend_bytes
from jaxmem.train._decision import decided_by_one, step_problem
from jaxmem.train._report import keep_compiled
from jaxmem.train._settle import rivals, settled
from jaxmem.train._spec import StepSpec

_logger = logging.getLogger(__name__)

Known = dict[tuple[Target, Settled], Trials]
"""What the budgets of a step have compiled so far, by target and form."""


def spend(spec: StepSpec, target: str | Target | None) -> StepSpec:
    """A spec with its remat budget spent: a share of the residuals by the model, bytes by the compiled peak.

    Among several processes one solves.

    Raises:
      BudgetInfeasible: naming the smallest peak reached.
    """
    budget = spec.config.budget
    if budget is None:
        return spec
    resolved = resolve_target(target)

    def solved() -> StepSpec:
        if budget.share is None:
            return spend_in_forms(spec, budget.bytes or 0, resolved, {})
        first = settled(spec, resolved)
        problem = step_problem(first, resolved)
        assignment = within_share(problem, budget.share)
        plan = ResidualPlan(problem=problem, assignment=assignment, target=resolved.name, settled=first.form)
        return first.with_decision(plan)

    return decided_by_one(spec, resolved, solved)


def spend_in_forms(
    spec: StepSpec,
    budget_bytes: int,
    target: Target,
    known: Known,
    *,
    offload: bool = False,
    max_compiles: int = MAX_COMPILES,
) -> StepSpec:
    """A spec with residuals, and the form, in which its step is fastest within a budget; see `spend_bytes`.

    The settled form is searched first. Each rival is compiled once, with as much kept as was found; the rest of the
    compiles goes to the form that is best then. What earlier budgets compiled, in any form, counts.

    Args:
      spec: of the step; a form that its config leaves open is settled, and may be changed.
      budget_bytes: for the compiled peak.
      target: what is compiled for.
      known: is added to.
      offload, max_compiles: as of `remat.fit_budget`, of all forms together.

    Raises:
      BudgetInfeasible: in no form a choice fits; names the smallest peak reached.
    """
    spec = settled(spec, target)
    others = [spec.in_form(form) for form in rivals(spec, target)]
    search = _Search(budget_bytes, target, known, offload, max_compiles)
    search.run(spec, max(1, max_compiles - len(others), (max_compiles + 1) // 2))
    for other in others:
        try:
            search.run(other, 1)
        except Exception as error:
            if is_own_fault(error):
                raise
            _logger.info("the form %s was refused: %s", other.settled, error)
    while search.left > 0:
        best = search.best
        if search.done(best) or search.run(best, search.left) == 0:
            break
    return search.result()


class _Search:
    """What was found in each form, and how many compiles are left for all of them."""

    def __init__(self, budget_bytes: int, target: Target, known: Known, offload: bool, max_compiles: int):
        self.budget_bytes, self.target, self.known = budget_bytes, target, known
        self.offload, self.left = offload, max_compiles
        self.found: dict[Settled, StepSpec] = {}
        self.refused: dict[Settled, BudgetInfeasible] = {}
        self.forms: dict[Settled, StepSpec] = {}
        self.ended: set[Settled] = set()
        self.compiles = 0

    def trials(self, form: Settled) -> Trials:
        return self.known[self.target, form]

    def run(self, spec: StepSpec, compiles: int) -> int:
        """Searches in one form; how many choices were tried."""
        form = spec.form
        compiles = min(compiles, self.left)
        if (self.target, form) not in self.known:
            if not compiles:
                return 0
            self.known[self.target, form] = Trials(step_problem(spec, self.target))
        trials = self.trials(form)
        if not (compiles or trials.allowed(self.offload)):
            return 0
        before, made = len(trials.made), trials.compiles
        start_bytes = None if trials.made else self.beside_bytes()
        self.forms[form] = spec
        try:
            limits = {"offload": self.offload, "max_compiles": compiles, "start_bytes": start_bytes}
            self.found[form] = spend_bytes(spec, self.budget_bytes, self.target, trials, **limits)
        except BudgetInfeasible as error:
            self.refused[form] = error
        tried = len(trials.made) - before
        self.left -= tried
        self.compiles += trials.compiles - made
        if tried < compiles:
            self.ended.add(form)
        return tried

    def done(self, form: StepSpec) -> bool:
        """Whether the search in a form ended before its compiles did."""
        return form.form in self.ended

    def beside_bytes(self) -> int | None:
        """What a program needs beside what its choice counts, as in the choice nearest to the budget in other forms."""
        tried = [t for form in self.forms for t in self.trials(form).allowed(self.offload)]
        if not tried:
            return None
        nearest = min(tried, key=lambda t: abs(t.peak_bytes - self.budget_bytes))
        return nearest.peak_bytes - int(nearest.assignment.total_bytes)

    @property
    def best(self) -> StepSpec:
        """The form whose choice is the best that fits; where none fits, whose peak is the smallest."""
        if self.found:
            timed = all(self.trial(form).seconds is not None for form in self.found)

            def worth(form: Settled) -> tuple[float, int]:
                trial = self.trial(form)
                return (trial.seconds or 0.0 if timed else trial.assignment.price), trial.peak_bytes

            return self.forms[min(self.found, key=worth)]
        return self.forms[min(self.refused, key=lambda form: min(t.peak_bytes for t in self.trials(form).made))]

    def trial(self, form: Settled) -> Trial:
        """That of the choice found in a form."""
        decision = self.found[form].decision
        assert decision is not None
        found = decision.assignment
        alike = lambda a: (a.choices, a.segments) == (found.choices, found.segments)  # noqa: E731
        return next(t for t in self.trials(form).made if alike(t.assignment))

    def result(self) -> StepSpec:
        form = self.best.form
        if form not in self.found:
            raise self.refused[form] from None
        spec = self.found[form]
        decision = spec.decision
        if decision is None or decision.compiles == self.compiles:
            return spec
        made = spec.with_decision(dataclasses.replace(decision, compiles=self.compiles))
        keep_compiled(made, self.target, of=spec)
        return made
