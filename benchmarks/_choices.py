"""Our choices for a model, compiled and cached by content; `fit` measures with them."""

import dataclasses
from collections.abc import Callable

import jax

from benchmarks._cells import Cells
from benchmarks._programs import program_record
from jaxmem.jaxprs import Call
from jaxmem.remat.auto._assignment import Assignment
from jaxmem.remat.auto._problem import problem_of, program_of
from jaxmem.remat.auto._rates import Rates
from jaxmem.remat.auto._residual_plan import apply_choices
from jaxmem.remat.auto._search import fit
from jaxmem.remat.auto._trial import Fitted, Measured, Trial
from jaxmem.targets import resolve_target


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The result for a budget: the compiler's record of the choice, and how it was found."""

    record: dict
    fitted: Fitted
    new: int

    @property
    def assignment(self) -> Assignment:
        return self.fitted.best.assignment


class Chosen:
    """A function `loss(params, data)` on a target, with choices of ours.

    Args:
      cells: remember compiles.
      name: of the model, for those who read along.
      loss, shapes: the function and its arguments.
      target: what is compiled for.

    Its `records` are what the compiler made of choices so far.
    """

    def __init__(self, cells: Cells, name: str, loss: Callable, shapes: tuple, target: str):
        self.cells, self.name, self.shapes, self.target = cells, name, shapes, target
        call = Call(loss, shapes, {})
        mask = jax.tree.leaves((jax.tree.map(lambda _: True, shapes[0]), jax.tree.map(lambda _: False, shapes[1])))
        self.program = program_of(call, call.leaves, mask)
        self.problem = problem_of(self.program, Rates.of(resolve_target(target)))
        self.trials: list[Trial] = []
        self.records: dict = {}

    def record(self, assignment: Assignment) -> dict:
        """The compiler's record of a choice."""
        key = tuple(sorted(assignment.choices.items(), key=lambda item: item[0])), tuple(assignment.segments.items())
        if key not in self.records:
            chosen = apply_choices(self.program, self.problem, assignment)
            loss = lambda params, data: chosen(*jax.tree.leaves((params, data)))[0]  # noqa: E731
            self.records[key] = program_record(self.cells, loss, self.shapes, self.target, what=f"{self.name} ours")
        return self.records[key]

    def fit(self, budget_bytes: int, objective: str, *, remember: bool = True, **options) -> Found:
        """`fit` with the earlier trials for this model and target.

        Raises:
          BudgetInfeasible: as `fit` does.
        """
        new = 0

        def measure(assignment: Assignment) -> Measured:
            nonlocal new
            record = self.record(assignment)
            new += 1
            return Measured(peak_bytes=record["peak_bytes"], seconds=record["step_seconds"])

        arguments = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.shapes))
        fitted = fit(
            self.problem,
            budget_bytes,
            measure,
            objective=objective,
            start_bytes=arguments,
            earlier=self.trials if remember else (),
            **options,
        )
        if remember:
            self.trials = list(fitted.trials)
        return Found(record=self.record(fitted.best.assignment), fitted=fitted, new=new)
