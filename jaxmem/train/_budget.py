"""A remat budget of a whole step: posed on its loss, spent by the compiled peak."""

import dataclasses
import hashlib
import logging
from typing import TYPE_CHECKING

import jax

from jaxmem._units import format_bytes
from jaxmem.budget import Budget
from jaxmem.errors import BudgetInfeasible
from jaxmem.remat.auto import (
    MAX_COMPILES,
    Assignment,
    Decision,
    Measured,
    Problem,
    Rates,
    Trial,
    fit,
    pose_call,
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
      trials: what was compiled for any of them.
    """

    problem: Problem
    trials: list[Trial] = dataclasses.field(default_factory=list)


def pose_step(step: "TrainStep", target: Target) -> Problem:
    """The blocks of the loss of one micro-batch of a step that has no remat, differentiated as the step does.

    What a device keeps of them is its share of the batch's rows.
    """

    def loss(trainable, frozen, batch, rng, state):
        return step.loss(frozen)(trainable, batch, rng=rng, state=state)

    with on_target(target), step.entered():
        return pose_call(loss, loss_arguments(step), {}, Rates.of(target), argnums=(0,), shards=step.reduction().shards)


def decide(step: "TrainStep", budget: Budget, target: Target) -> Decision:
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
        return Decision(problem=problem, assignment=within_share(problem, budget.share))
    return fit_step(step, budget.bytes or 0, target, Tried(pose_step(step, target)))


def fit_step(
    step: "TrainStep",
    budget_peak_bytes: int,
    target: Target,
    tried: Tried,
    *,
    offload: bool = False,
    max_compiles: int = MAX_COMPILES,
) -> Decision:
    """As `remat.fit_budget`, for a step without remat; reads what was tried, and adds to it."""
    problem, peaks = tried.problem, Peaks.on_disk()

    def measure(assignment: Assignment) -> Measured:
        chosen = step.with_decision(Decision(problem=problem, assignment=assignment))
        found = measured(chosen)
        tried.trials.append(Trial(assignment=assignment, peak_bytes=found.peak_bytes, seconds=found.seconds))
        return found

    def measured(chosen: "TrainStep") -> Measured:
        from jaxmem.train._analysis import analyze  # which knows steps

        key = _content(chosen, target)
        found = peaks.get(key)
        if found is not None:
            return Measured(**found, fresh=False)
        _logger.info("a budget of %s on %s: %s", format_bytes(budget_peak_bytes), target.name, _so_far(tried.trials))
        report = analyze(chosen, target=target)
        found = {"peak_bytes": report.peak_bytes, "seconds": report.step_seconds}
        peaks.put(key, found)
        return Measured(**found, fresh=True)

    arguments = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(step.abstract_arguments()))
    alone = target.device_count == 1
    try:
        fitted = fit(
            problem,
            budget_peak_bytes,
            measure,
            offload=offload,
            start_bytes=arguments // target.device_count,
            max_compiles=max_compiles,
            earlier=[trial for trial in tried.trials if offload or not trial.assignment.host_bytes],
        )
    except BudgetInfeasible as error:
        known = f", of which the step's arguments are {format_bytes(arguments)}" if alone else ""
        got = f"{error.got}, on {target.name}{known}"
        shown = set(target.compiler_options) >= set(resolve_target("cpu").compiler_options)
        hint = "" if target.platform != "cpu" or shown else _UNSEEN
        raise BudgetInfeasible(wanted=error.wanted, got=got, do=error.do + hint) from None
    return Decision(
        problem=problem,
        assignment=fitted.best.assignment,
        peak_bytes=fitted.best.peak_bytes,
        compiles=fitted.compiles,
    )


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
    options = sorted({**dict(target.compiler_options), **dict(step.workload.compiler_options or {})}.items())
    said = (program, target.name, target.topology, options, devices, versions())
    return hashlib.sha256(repr(said).encode()).hexdigest()
