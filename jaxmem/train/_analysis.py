"""Teaches `analyze` and `compare` what a workload, a config and a train step are."""

import math
import warnings

import jax
import jax.numpy as jnp

from jaxmem._miscompilations import told
from jaxmem._units import format_bytes
from jaxmem.analysis import (
    CompiledProgram,
    MemoryReport,
    Program,
    analyze,
    analyze_program,
    as_program,
    compare,
    compiled_program,
    kinds_by_path,
)
from jaxmem.config import MemoryConfig
from jaxmem.errors import InputError, RematWarning, WorkloadError
from jaxmem.policy import as_policy
from jaxmem.remat import Examination
from jaxmem.targets import Target, on_target, resolve_target
from jaxmem.train._loss import partition
from jaxmem.train._peaks import Peak
from jaxmem.train._reduction import local_shape
from jaxmem.train._step import TrainStep, build_step
from jaxmem.workload import Workload

__all__ = ["analyze", "compare"]

_NOT_EVIDENCED = (
    "Offload is not evidenced here: XLA:CPU keeps host and device values in one memory, and counts neither."
)

_NARROW_SUMS = (
    "Gradients of {} micro-batches are summed in {}: what is small beside the sum so far is lost. "
    'accumulator_dtype="float32" loses nothing.'
)

_WORTH_SAYING = 0.25  # of what full rematerialisation keeps
_FULL = as_policy("full")

_WHEN = {"once": "once, after the last micro-batch", "each": "with each micro-batch"}

_KIND_OF = kinds_by_path(
    {"state": "state", "state.params": "parameters", "state.opt_state": "optimizer_state", "batch": "batch"}
)


@analyze.register
def _(workload: Workload, config: MemoryConfig | None = None, *, target: str | Target | None = None) -> MemoryReport:
    return analyze(build_step(workload, config, target=target), target=target)


@analyze.register
def _(step: TrainStep, *, target: str | Target | None = None) -> MemoryReport:
    resolved = resolve_target(target)
    return analyze_program(_program(step, "step", resolved), resolved)


def peak_of(step: TrainStep, target: Target) -> tuple[Peak, CompiledProgram]:
    """What a step's report says of its peak, and the program that it is of.

    Raises:
      InputError: the target's compiler does not tell.
    """
    program = compiled_program(_program(step, "step", target), target)
    report = analyze_program(program, target)
    assert program.made is not None
    if report.peak_bytes is None:
        raise InputError(
            wanted=f"a target whose compiler tells the peak, for a budget of bytes on {target.name}",
            got="no memory analysis",
            do='Compile for target="cpu" or a chip by its name, or use a share: remat="auto:0.25".',
        )
    # What was refused for lack of memory needs more than there is, whatever the compiler counted.
    at_least = 0 if program.made.refusal is None else (report.capacity_bytes or 0) + 1
    return Peak(max(report.peak_bytes, at_least), report.step_seconds), program.made


@as_program.register
def _(config: MemoryConfig, *args, name: str, target: Target) -> Program:
    if len(args) != 1 or not isinstance(args[0], Workload):
        raise WorkloadError(
            wanted="compare({name: MemoryConfig(...)}, workload)",
            got=f"{', '.join(type(arg).__name__ for arg in args) or 'no argument'} beside a MemoryConfig",
            do="Pass the Workload as the only argument after the configs.",
        )
    return _program(build_step(args[0], config, target=target), name, target)


@as_program.register
def _(step: TrainStep, *args, name: str, target: Target) -> Program:
    return _program(step, name, target)


def _program(step: TrainStep, name: str, target: Target) -> Program:
    policy = step.config.policy
    made = step.made[1] if step.made is not None and step.made[0] == target else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # they are notes of the report
        traced, target, seen = step.trace_for(target)
    notes = (*step.examine().warnings, *step.idle_settings)
    if step.reduction().why:
        notes = (*notes, f"Gradients are reduced {_WHEN[step.reduction().kind]}: {step.reduction().why}.")
    if step.added is not None:
        notes = (*notes, str(step.added))
    notes = (*notes, *map(told, step.faults_avoided(target.platform)))
    if policy.offload and target.platform == "cpu":
        notes = (*notes, _NOT_EVIDENCED)
    if policy == _FULL:
        with on_target(target), step.entered():
            notes = (*notes, *_left(step.examine()))
    if step.decision is not None and step.config.budget is not None:
        notes = (*notes, str(step.solution()).splitlines()[-1])
    if _sums_narrowly(step.config):
        notes = (*notes, _NARROW_SUMS.format(step.config.accumulation_steps, step.config.dtypes.accumulator))

    def plain_residual_bytes() -> int | None:
        if step.examine().inside:
            return None  # what is kept while a segment is recomputed is no residual of the forward pass
        with on_target(target):  # a loss may need its mesh
            return step.residual_bytes(remat="none")

    return Program.from_traced(
        traced,
        target=target,
        name=name,
        compiler_options=step.compiler_options(target.platform),
        refuse_miscompiled=True,
        saved_residual_bytes=step.residual_bytes,
        # A budget may be enough to keep everything.
        plain_residual_bytes=None if step.config.budget is not None else plain_residual_bytes,
        remat=str(policy if step.config.budget is None else step.config.remat),
        gradients=_gradient_shapes(step),
        shards=step.reduction().shards,
        gradient_reduction=step.reduction().kind if step.reduction().shards > 1 else None,
        kind_of=_KIND_OF,
        saved_names=lambda: _saved_names(step),
        notes=(*notes, *seen),
        made=made,
    )


def _left(found: Examination) -> list[str]:
    """What full rematerialisation leaves: a loss's logits, what lies before the first block."""
    try:
        outside = found.outside() if found.outside is not None else ()
    except Exception:  # blocks with effects that no custom derivative may have: a note is not worth the report
        return []
    left, kept = sum(row.size_bytes for row in outside), found.residuals.device_bytes
    if left < _WORTH_SAYING * kept:
        return []
    named = [f"{format_bytes(row.size_bytes)} {row.op} ({row.source or row.module or '-'})" for row in outside[:3]]
    return [
        f"full leaves {format_bytes(left)} of its {format_bytes(kept)} of residuals outside of blocks, the largest "
        f"{', '.join(named)}: a budget (auto:6GiB, auto:0.25) may choose among these, too."
    ]


def _sums_narrowly(config: MemoryConfig) -> bool:
    return config.accumulation_steps > 1 and jnp.finfo(config.dtypes.accumulator).bits < 32


def _gradient_shapes(step: TrainStep) -> tuple[tuple[int, ...], ...]:
    trainable, _ = partition(step.abstract_arguments()[0].params, step.workload.trainable)
    return tuple(local_shape(leaf) for leaf in jax.tree.leaves(trainable))


def _saved_names(step: TrainStep) -> dict[tuple[str, int], str]:
    """Names of the values that one micro-batch keeps, by source line and number of elements, where these tell."""
    names: dict[tuple[str, int], set[str]] = {}
    for row in step.examine().residuals.rows:
        names.setdefault((row.source, math.prod(row.shape)), set()).add(row.name or "")
    return {key: next(iter(found)) for key, found in names.items() if len(found) == 1 and found != {""}}
