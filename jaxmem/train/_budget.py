"""A remat budget of a whole step: posed on its loss, spent by the compiled peak."""

import dataclasses
import hashlib
import logging
from typing import TYPE_CHECKING

import jax

from jaxmem._blame import is_own_fault, whole_tracebacks
from jaxmem._units import format_bytes
from jaxmem.analysis import CompiledProgram
from jaxmem.budget import Budget
from jaxmem.errors import BudgetInfeasible, JaxmemError
from jaxmem.remat.auto import (
    MAX_COMPILES,
    REFUSED,
    Assignment,
    Measured,
    Problem,
    Rates,
    ResidualPlan,
    Trial,
    build_problem,
    fit,
    in_the_way,
    within_share,
)
from jaxmem.targets import Target, on_target, resolve_target
from jaxmem.train._peaks import Peaks, versions
from jaxmem.train._remat import loss_arguments

if TYPE_CHECKING:
    from jaxmem.train._step import TrainStep


_logger = logging.getLogger(__name__)
_UNSEEN = " XLA:CPU as it runs hides what rematerialisation saves; target='cpu', or a chip's name, shows it."


@dataclasses.dataclass
class Tried:
    """What the budgets of one step on one target have in common; a larger one never gets a worse choice than another.

    Args:
      problem: the step's blocks.
      trials: what was compiled, or remembered, for any of them.
    """

    problem: Problem
    trials: list[Trial] = dataclasses.field(default_factory=list)

    def allowed(self, offload: bool) -> list[Trial]:
        """The trials of choices that need no host memory, where there shall be none."""
        return [trial for trial in self.trials if offload or not trial.assignment.host_bytes]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spent:
    """What a budget was spent on.

    Args:
      decision: the choices.
      made: the step's program as compiled; None where it was compiled for an earlier budget, or not at all.
    """

    decision: ResidualPlan
    made: CompiledProgram | None = None


def pose_step(step: "TrainStep", target: Target) -> Problem:
    """The blocks of the loss of one micro-batch of a step that has no remat, differentiated as the step does.

    What a device keeps of them is its share of the batch's rows.
    """

    def loss(trainable, frozen, batch, rng, state):
        return step.loss(frozen)(trainable, batch, rng=rng, state=state)

    with on_target(target), step.entered():
        return build_problem(
            loss, loss_arguments(step), {}, Rates.of(target), argnums=(0,), shards=step.reduction().shards
        )


def decide(step: "TrainStep", budget: Budget, target: Target) -> Spent:
    """What a budget buys for a step: a share of its residuals by the model, bytes by the compiled peak.

    Args:
      step: without remat.
      budget: what was asked for.
      target: what is compiled for.

    Raises:
      BudgetInfeasible: naming the smallest peak reached.
    """
    if budget.share is not None:
        problem = pose_step(step, target)
        return Spent(decision=ResidualPlan(problem=problem, assignment=within_share(problem, budget.share)))
    return fit_step(step, budget.bytes or 0, target, Tried(pose_step(step, target)))


def fit_step(
    step: "TrainStep",
    budget_peak_bytes: int,
    target: Target,
    tried: Tried,
    *,
    offload: bool = False,
    max_compiles: int = MAX_COMPILES,
) -> Spent:
    """As `remat.fit_budget`, for a step without remat; reads what was tried, and adds to it.

    What is decided, and what is refused, rests on a program that this process compiled.
    """
    # A TPU's compiler refuses what is larger than the device, whatever the budget.
    room = target.memory_bytes if target.deviceless and target.platform == "tpu" else None
    limit = budget_peak_bytes if room is None else min(budget_peak_bytes, room)
    compiler = _Compiler(step, limit, target, tried)
    arguments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.abstract_arguments()))
    while True:
        try:
            fitted = fit(
                tried.problem,
                limit,
                compiler.measure,
                offload=offload,
                start_bytes=arguments // target.device_count,
                max_compiles=max_compiles,
                earlier=tried.allowed(offload),
            )
        except BudgetInfeasible as error:
            least = min(tried.allowed(offload), key=lambda trial: trial.peak_bytes)
            if least.peak_bytes >= REFUSED and compiler.refusal is not None:
                raise compiler.refusal from None
            if not compiler.confirms(least):
                continue
            raise _said(error, tried.problem, limit, target, arguments, least.assignment) from None
        if compiler.confirms(fitted.best):
            best = fitted.best
            decision = ResidualPlan(
                problem=tried.problem,
                assignment=best.assignment,
                peak_bytes=best.peak_bytes,
                compiles=compiler.compiles,
            )
            return Spent(decision=decision, made=compiler.made.get(_same(best.assignment)))


class _Compiler:
    """What a target's compiler makes of choices for a step. What is remembered on disk is a hint until it is confirmed.

    Args:
      step: without remat.
      limit_bytes: of the peak.
      target: what is compiled for.
      tried: is added to.
    """

    def __init__(self, step: "TrainStep", limit_bytes: int, target: Target, tried: Tried):
        self.step, self.limit_bytes, self.target, self.tried = step, limit_bytes, target, tried
        self.peaks, self.remembers = Peaks.on_disk(), True
        self.made: dict = {}
        self.programs: dict[tuple, tuple[TrainStep, str]] = {}
        self.compiles = 0
        self.refusal: Exception | None = None

    def measure(self, assignment: Assignment) -> Measured:
        """The peak of a choice, remembered or compiled."""
        measured = self._measured(assignment, anew=False)
        self.tried.trials.append(measured.trial(assignment))
        return measured

    def _measured(self, assignment: Assignment, *, anew: bool) -> Measured:
        """The peak of a choice, compiled `anew` or not; over every budget where JAX or the compiler refuses it."""
        from jaxmem.train._analysis import peak_of  # which knows steps

        try:
            with whole_tracebacks():
                chosen, key = self._program(assignment)
                own = self.peaks.own(key)
                found = own or (self.peaks.get(key) if self.remembers else None)
                if found is not None and not anew:
                    return Measured(**found._asdict(), fresh=False, confirmed=own is not None)
                so_far = _so_far(self.tried.trials)
                _logger.info("a budget of %s on %s: %s", format_bytes(self.limit_bytes), self.target.name, so_far)
                self.compiles += 1
                peak, self.made[_same(assignment)] = peak_of(chosen, self.target)
        except Exception as error:
            if is_own_fault(error) or isinstance(error, JaxmemError):
                raise
            self.refusal = error
            return Measured(peak_bytes=REFUSED)
        self.peaks.put(key, peak)
        return Measured(**peak._asdict())

    def _program(self, assignment: Assignment) -> "tuple[TrainStep, str]":
        """The step of a choice and the content of its program, which take a trace: found once."""
        at = _same(assignment)
        if at not in self.programs:
            chosen = self.step.with_decision(ResidualPlan(problem=self.tried.problem, assignment=assignment))
            self.programs[at] = chosen, _content(chosen, self.target)
        return self.programs[at]

    def confirms(self, trial: Trial) -> bool:
        """Whether a compile says what is known of a choice; if not, nothing that was only remembered is known."""
        if trial.confirmed:
            return True
        measured = self._measured(trial.assignment, anew=True)
        confirmed = (measured.peak_bytes, measured.seconds) == (trial.peak_bytes, trial.seconds)
        same = [t for t in self.tried.trials if _same(t.assignment) == _same(trial.assignment)]
        self.tried.trials[:] = [t for t in self.tried.trials if t not in same and (confirmed or t.confirmed)]
        self.tried.trials.append(measured.trial(trial.assignment))
        self.remembers &= confirmed
        return confirmed


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


def _so_far(trials: list[Trial]) -> str:
    if not trials:
        return "compiling the first choice"
    return f"{len(trials)} compiled, the smallest peak {format_bytes(min(t.peak_bytes for t in trials))}; one more"


def _content(step: "TrainStep", target: Target) -> str:
    """What a compiled peak depends on, as one word."""
    traced, target, _ = step.trace_for(target)
    with on_target(target):
        program = traced.lower().as_text()
    devices = [(device.platform, device.device_kind) for device in target.devices]
    options = sorted({**dict(target.compiler_options), **dict(step.compiler_options(target.platform) or {})}.items())
    said = (program, target.name, target.topology, options, devices, versions())
    return hashlib.sha256(repr(said).encode()).hexdigest()
