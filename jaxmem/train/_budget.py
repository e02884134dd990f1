"""A remat budget of a whole step: its problem is built of the loss, and it is spent by the compiled peak."""

import dataclasses
import logging

import jax

from jaxmem._blame import is_own_fault, whole_tracebacks
from jaxmem._units import format_bytes
from jaxmem.errors import BudgetInfeasible, JaxmemError
from jaxmem.remat.auto import (
    MAX_COMPILES,
    REFUSED,
    Assignment,
    Measured,
    Problem,
    ResidualPlan,
    Trial,
    fit,
    in_the_way,
)
from jaxmem.targets import Target, resolve_target
from jaxmem.train._peaks import Peaks
from jaxmem.train._program import TargetProgram, content, trace_for
from jaxmem.train._report import compiled_peak, keep_compiled
from jaxmem.train._spec import StepSpec
from jaxmem.train._update import abstract_arguments

_logger = logging.getLogger(__name__)
_UNSEEN = " XLA:CPU as it runs hides what rematerialisation saves; target='cpu', or a chip's name, shows it."


@dataclasses.dataclass
class Trials:
    """Shared by all budgets of a step in one form on a target: a larger one never gets a worse choice than a smaller.

    Args:
      problem: the step's blocks.
      made: what was compiled, or remembered, for any of them.
      programs: the content of the step's program by the choice, as of `_same`.
      compiles: how many programs were compiled for them.
    """

    problem: Problem
    made: list[Trial] = dataclasses.field(default_factory=list)
    programs: dict[tuple, str] = dataclasses.field(default_factory=dict)
    compiles: int = 0

    def allowed(self, offload: bool) -> list[Trial]:
        """The trials of choices that need no host memory, where there shall be none."""
        return [trial for trial in self.made if offload or not trial.assignment.host_bytes]


def spend_bytes(
    spec: StepSpec,
    budget_peak_bytes: int,
    target: Target,
    trials: Trials,
    *,
    offload: bool = False,
    max_compiles: int = MAX_COMPILES,
    start_bytes: int | None = None,
) -> StepSpec:
    """As `remat.fit_budget`, in one form; reads the trials that were made, and adds to them.

    What is decided, and what is refused, rests on a program that this process compiled.

    Args:
      start_bytes: what the program needs beside what its choice counts; None where only its arguments are known.
    """
    # A TPU's compiler refuses what is larger than the device, whatever the budget.
    room = target.memory_bytes if target.deviceless and target.platform == "tpu" else None
    limit = budget_peak_bytes if room is None else min(budget_peak_bytes, room)
    compiler = _Compiler(spec, limit, target, trials)
    arguments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract_arguments(spec)))
    while True:
        try:
            fitted = fit(
                trials.problem,
                limit,
                compiler.measure,
                offload=offload,
                start_bytes=arguments // target.device_count if start_bytes is None else start_bytes,
                max_compiles=max_compiles,
                earlier=trials.allowed(offload),
            )
        except BudgetInfeasible as error:
            least = min(trials.allowed(offload), key=lambda trial: trial.peak_bytes)
            if least.peak_bytes >= REFUSED and compiler.refusal is not None:
                raise compiler.refusal from None
            if not compiler.confirms(least):
                continue
            raise _said(error, trials.problem, limit, target, arguments, least.assignment) from None
        if compiler.confirms(fitted.best):
            return compiler.decided(fitted.best)


class _Compiler:
    """What a target's compiler makes of choices for a step. What is remembered on disk is a hint until it is confirmed.

    Args:
      spec: of the step.
      limit_bytes: of the peak.
      target: what is compiled for.
      trials: is added to.
    """

    def __init__(self, spec: StepSpec, limit_bytes: int, target: Target, trials: Trials):
        self.spec, self.limit_bytes, self.target, self.trials = spec, limit_bytes, target, trials
        self.peaks, self.remembers = Peaks.on_disk(), True
        self.candidates: dict[tuple, tuple[StepSpec, TargetProgram, jax.stages.Lowered]] = {}
        self.compiles = 0
        self.refusal: Exception | None = None

    def measure(self, assignment: Assignment) -> Measured:
        """The peak of a choice, remembered or compiled."""
        measured = self._measured(assignment, anew=False)
        self.trials.made.append(measured.trial(assignment))
        return measured

    def _measured(self, assignment: Assignment, *, anew: bool) -> Measured:
        """The peak of a choice, compiled `anew` or not; over every budget where JAX or the compiler refuses it."""
        try:
            with whole_tracebacks():
                spec, traced, lowered = self._candidate(assignment)
                key = self.trials.programs[_same(assignment)]
                own = self.peaks.own(key)
                found = own or (self.peaks.get(key) if self.remembers else None)
                if found is not None and not anew:
                    return Measured(**found._asdict(), fresh=False, confirmed=own is not None)
                _logger.info("budget trial %d%s", *self._so_far())
                self.compiles += 1
                self.trials.compiles += 1
                peak = compiled_peak(spec, traced, lowered, self.target)
        except Exception as error:
            if is_own_fault(error) or isinstance(error, JaxmemError):
                raise
            self.refusal = error
            return Measured(peak_bytes=REFUSED)
        self.peaks.put(key, peak)
        return Measured(**peak._asdict())

    def _so_far(self) -> tuple[int, str]:
        """The number of the trial to come, and what those before it reached."""
        peaks = [trial.peak_bytes for trial in self.trials.made if trial.peak_bytes < REFUSED]
        return len(self.trials.made) + 1, f", smallest peak so far {format_bytes(min(peaks))}" if peaks else ""

    def _candidate(self, assignment: Assignment) -> tuple[StepSpec, TargetProgram, jax.stages.Lowered]:
        """The step of a choice, traced and lowered once; the content of its program goes to the trials."""
        at = _same(assignment)
        if at not in self.candidates:
            plan = ResidualPlan(problem=self.trials.problem, assignment=assignment, settled=self.spec.form)
            spec = self.spec.with_decision(plan)
            traced = trace_for(spec, self.target)
            lowered = traced.lower()
            self.trials.programs[at] = content(spec, lowered, traced.target)
            self.candidates[at] = spec, traced, lowered
        return self.candidates[at]

    def confirms(self, trial: Trial) -> bool:
        """Whether a compile says what is known of a choice; if not, nothing that was only remembered is known."""
        if trial.confirmed:
            return True
        measured = self._measured(trial.assignment, anew=True)
        confirmed = (measured.peak_bytes, measured.seconds) == (trial.peak_bytes, trial.seconds)
        same = [t for t in self.trials.made if _same(t.assignment) == _same(trial.assignment)]
        self.trials.made[:] = [t for t in self.trials.made if t not in same and (confirmed or t.confirmed)]
        self.trials.made.append(measured.trial(trial.assignment))
        self.remembers &= confirmed
        return confirmed

    def decided(self, trial: Trial) -> StepSpec:
        """The spec of a choice; where this budget compiled it, with its trace and its program."""
        decision = ResidualPlan(
            problem=self.trials.problem,
            assignment=trial.assignment,
            peak_bytes=trial.peak_bytes,
            compiles=self.compiles,
            target=self.target.name,
            program=self.trials.programs[_same(trial.assignment)],
            settled=self.spec.form,
        )
        spec = self.spec.with_decision(decision)
        if _same(trial.assignment) in self.candidates:
            keep_compiled(spec, self.target, of=self.candidates[_same(trial.assignment)][0])
        return spec


def _same(assignment: Assignment) -> tuple:
    """Equal for assignments that make the same program."""
    return tuple(sorted(assignment.choices.items(), key=lambda item: item[0])), tuple(assignment.segments.items())


def _said(
    error: BudgetInfeasible,
    problem: Problem,
    limit_bytes: int,
    target: Target,
    arguments: int,
    least: Assignment,
) -> BudgetInfeasible:
    """The refusal with what is known of the step beside the numbers."""
    known = f", of which the step's arguments are {format_bytes(arguments)}" if target.device_count == 1 else ""
    shown = set(target.compiler_options) >= set(resolve_target("cpu").compiler_options)
    hint = "" if target.platform != "cpu" or shown else _UNSEEN
    wanted = error.wanted
    if limit_bytes == target.memory_bytes:
        wanted += f", all that a device of {target.name} has"
    values = in_the_way(problem, least)
    got = f"{error.got}, on {target.name}{known}" + (f"; the largest that it keeps are {values}" if values else "")
    return BudgetInfeasible(wanted=wanted, got=got, do=error.do + hint)
