"""The decision of a step's remat budget as text: put back into a step, and the same in all processes."""

import dataclasses
from collections.abc import Callable

import jax

from jaxmem._blame import warn
from jaxmem._processes import conversation
from jaxmem._units import format_bytes
from jaxmem.config import MemoryConfig
from jaxmem.errors import ConfigError, DecisionError, SettingWarning
from jaxmem.remat.auto import Problem, Rates, ResidualPlan, Stored, build_problem, smallest, versions
from jaxmem.targets import Target, on_target, resolve_target
from jaxmem.train._program import content, trace_for
from jaxmem.train._reduction import reduction
from jaxmem.train._spec import StepSpec


def step_problem(spec: StepSpec, target: Target, rates: Rates | None = None) -> Problem:
    """The blocks of the loss of one micro-batch, without remat, differentiated as the step does.

    What a device keeps of them is its share of the batch's rows.

    Args:
      spec: of the step.
      target: what it is traced for.
      rates: by which seconds are told; the target's where None.
    """
    plain = spec.without_remat()
    if plain.settled is not None:  # ties come last: they are put where blocks are
        plain = plain.in_form(dataclasses.replace(plain.settled, order="free"))
    with on_target(target), plain.entered():
        arguments, shards = plain.loss_arguments(), reduction(plain).shards
        rates = Rates.of(target) if rates is None else rates
        problem = build_problem(plain.whole_loss, arguments, {}, rates, argnums=(0,), shards=shards)
        return dataclasses.replace(problem, runs=spec.config.accumulation_steps)


def put_back(spec: StepSpec, target: str | Target | None, text: str) -> StepSpec:
    """A spec with a stored decision. Nothing is solved, and nothing is compiled.

    The decision's compiled peak is kept where the step lowers to the very program that was compiled for it, for the
    same target, by the same compilers; otherwise it is None.

    Raises:
      ConfigError: the spec's remat setting is a policy; or the decision's peak is over the spec's budget.
      DecisionError: the text is none, is over the spec's share, or was written for other blocks or another form.
    """
    budget = spec.config.budget
    if budget is None and spec.config.remat != "none":
        raise ConfigError(
            wanted='a remat budget, or remat="none", for a step with a stored decision',
            got=f"remat={spec.config.remat!r}",
            do="Leave the decision out, or the policy.",
        )
    stored, resolved = Stored.read(text), resolve_target(target)
    _check_form(spec.config, stored)
    plan = ResidualPlan.of_stored(stored, step_problem(spec.in_form(stored.settled), resolved, stored.rates))
    made = spec.in_form(stored.settled).with_decision(plan)
    if budget is not None and budget.share:
        _check_share(plan, budget.share)
    if plan.peak_bytes is None:
        if budget is not None and budget.bytes is not None:
            _not_proven(f"was not compiled: that its peak is within {budget}")
        return made
    unlike = _unlike(made, resolved, stored)
    if not unlike:
        if budget is not None and budget.bytes is not None and plan.peak_bytes > budget.bytes:
            raise ConfigError(
                wanted=f"a decision whose compiled peak is within {budget}",
                got=format_bytes(plan.peak_bytes),
                do="Give the budget that it was made for, or leave the decision out, so that this one is spent.",
            )
        return made
    peak = format_bytes(plan.peak_bytes)
    _not_proven(f"was compiled {unlike}: that its peak is {peak} here, too,")
    return spec.with_decision(dataclasses.replace(plan, peak_bytes=None, program=None))


def _check_form(config: MemoryConfig, stored: Stored) -> None:
    for field, made in dataclasses.asdict(stored.settled).items():
        asked = getattr(config, field, "auto")
        if asked not in ("auto", made):
            raise DecisionError(
                wanted=f"a decision for a step with {field}={asked!r}",
                got=f"one for {field}={made!r}",
                do=f'Leave {field} at "auto", or leave the decision out, so that this one is spent.',
            )


def _check_share(plan: ResidualPlan, share: float) -> None:
    whole, kept = plan.problem.plain_bytes, plan.assignment.kept_bytes
    if whole and kept > plan.problem.share_bytes(share, smallest(plan.problem).kept_bytes) * (1 + 1e-9):
        raise DecisionError(
            wanted=f"a decision that keeps at most {share:g} of the residuals, {format_bytes(int(share * whole))}",
            got=f"one that keeps {kept / whole:.3g}, {format_bytes(kept)}",
            do="Give the budget that it was made for, or leave the decision out, so that this one is spent.",
        )


def _not_proven(what: str) -> None:
    warn(
        f"The stored decision of the remat budget {what} is not proven. "
        "step.report() compiles the step and tells its peak.",
        SettingWarning,
    )


def _unlike(made: StepSpec, target: Target, stored: Stored) -> str:
    """What was compiled for a stored decision, where it was not this step's program; "" where it was."""
    now = versions()["jax"]
    if stored.jax != now:
        return f"by jax {stored.jax}, not {now}"
    known = stored.fields["target"]
    if known != target.name:
        return f"for {known}, not {target.name}"
    traced = trace_for(made, target)
    if stored.fields["program"] != content(made, traced.lower(), traced.target):
        return "with another step, or other compilers"
    return ""


def decided_by_one(spec: StepSpec, target: Target, solve: Callable[[], StepSpec]) -> StepSpec:
    """What process 0 solved; the others put its decision back. A failure there is one here, too.

    Args:
      spec: without a decision.
      target: what it is solved for.
      solve: makes the spec with one; called in process 0.
    """
    if jax.process_count() == 1:
        return solve()
    made: list[StepSpec] = []

    def decide() -> str:
        made.append(solve())
        assert made[0].decision is not None
        return made[0].decision.to_json()

    text = conversation("spending the remat budget").first_does(decide)
    return made[0] if made else put_back(spec, target, text)
