"""The report of a step: its program with what the levers say of it, and its peak alone for the trials of a budget."""

import dataclasses
import warnings
from typing import Any

import jax

from jaxmem._blame import is_own_fault
from jaxmem._miscompilations import told
from jaxmem._settled import WORDS
from jaxmem._shown import array_type
from jaxmem.analysis import (
    MemoryReport,
    Program,
    analyze_program,
    compiled_program,
    kinds_by_path,
    peak_and_seconds,
)
from jaxmem.analysis.step_time import forward_seconds
from jaxmem.errors import InputError, RematWarning
from jaxmem.targets import Target, on_target, resolve_target
from jaxmem.train import _scan_stacks
from jaxmem.train._layout import sharding_of
from jaxmem.train._loss import partition
from jaxmem.train._mistakes import blaming
from jaxmem.train._peaks import Peak
from jaxmem.train._phases import run_phases
from jaxmem.train._program import TargetProgram, trace_for
from jaxmem.train._roll import what_is_rolled
from jaxmem.train._settle import settled
from jaxmem.train._spec import StepSpec
from jaxmem.train._update import LEVERS, idle_settings

_KIND_OF = kinds_by_path(
    {"state": "state", "state.params": "parameters", "state.opt_state": "optimizer_state", "batch": "batch"}
)
_MOST_LEAVES = 20  # of a batch, in the settings of a report
_COMPILED = "compiled"  # (this, target) → trace and program, in what is known of a spec


def program(spec: StepSpec, name: str, target: Target) -> Program:
    """The step of a spec as it is analysed: traced for a target, with what is known of it before it is compiled."""
    spec = settled(spec, target)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # they are notes of the report
        traced, made = spec.known.get((_COMPILED, target)) or (trace_for(spec, target), None)
        with on_target(traced.target), blaming(spec):  # levers trace the loss, which may need its mesh
            said = [lever.told(spec, traced.target) for lever in LEVERS]
    notes = [note for one in said for note in one.notes]
    notes += idle_settings(spec)
    news = [line for one in said for line in one.news]
    news += map(told, spec.faults_avoided(target.platform))
    news += _scan_stacks.told(traced.traced.jaxpr.jaxpr, target.platform)
    if traced.added is not None:
        (notes if traced.added.by_value else news).append(str(traced.added))
    fields = {field: value for one in said for field, value in one.fields.items()}
    trainable, _ = partition(traced.arguments[0].params, spec.workload.trainable)
    return Program.from_traced(
        traced.traced,
        target=traced.target,
        lower=traced.lower,
        name=name,
        compiler_options=spec.compiler_options(target.platform),
        refuse_miscompiled=True,
        kind_of=_KIND_OF,
        config=spec.config,
        settled=spec.settled,
        generator=_generator(spec),
        notes=(*notes, *traced.notes),
        news=tuple(news),
        gradients=tuple(map(_local_shape, jax.tree.leaves(trainable))),
        phases=run_phases(spec, traced, [need for one in said for need in one.phases]),
        settings=_settings(spec, traced.arguments[1], target),
        made=made,
        **fields,
    )


def _settings(spec: StepSpec, batch: Any, target: Target) -> dict[str, str]:
    """What a step was made with, in words: its config, the batch, options for the compiler."""
    fields = jax.tree_util.tree_leaves_with_path(dataclasses.asdict(spec.config))
    config = {".".join(str(key.key) for key in path if hasattr(key, "key")): str(leaf) for path, leaf in fields}
    form = {} if spec.settled is None else dataclasses.asdict(spec.settled)
    config |= {name: f"auto: {WORDS[name][value]}" for name, value in form.items() if config.get(name) == "auto"}
    leaves = jax.tree_util.tree_leaves_with_path(batch)[:_MOST_LEAVES]
    shapes = {f"batch{jax.tree_util.keystr(path)}": array_type(leaf) for path, leaf in leaves}
    options = {name: str(value) for name, value in (spec.compiler_options(target.platform) or {}).items()}
    return config | shapes | options


def _generator(spec: StepSpec) -> str:
    """The generator that the step draws with; that of its key, where no other is asked for."""
    asked = spec.config.generator
    return str(jax.random.key_impl(spec.rng)) if asked == "given" else asked


def _local_shape(leaf: Any) -> tuple[int, ...]:
    """The shape of a leaf on one device."""
    own = sharding_of(leaf)
    return tuple(leaf.shape if own is None else own.shard_shape(leaf.shape))


def keep_compiled(spec: StepSpec, target: Target, of: StepSpec) -> None:
    """Lets a spec that makes the same program as another report what was compiled for that one, if it was."""
    if (_COMPILED, target) in of.known:
        spec.known[_COMPILED, target] = of.known[_COMPILED, target]


def report(spec: StepSpec, target: str | Target | None) -> MemoryReport:
    """What the compiled step needs on a target."""
    resolved = resolve_target(target)
    made = program(spec, "step", resolved)
    spec = settled(spec, resolved)
    if spec.config.roll == "auto" and spec.settled is not None and not spec.settled.roll:
        made = dataclasses.replace(made, unrolled=lambda: _equal_layers(spec))
    return analyze_program(made, resolved)


def _equal_layers(spec: StepSpec) -> int:
    """How many layers rolling would run as one scan, the most of one kind."""
    try:
        return max((each.count for each in what_is_rolled(spec).layers), default=0)
    except Exception as error:  # a finding is no reason to fail
        if is_own_fault(error):
            raise
        return 0


def compiled_peak(spec: StepSpec, traced: TargetProgram, lowered: jax.stages.Lowered, target: Target) -> Peak:
    """Compiles a step for its peak and seconds; the spec keeps the program, so that its report compiles no other.

    Raises:
      InputError: the target's compiler does not tell the peak.
      MiscompiledError: the compiler made the step compute wrong numbers, in a way that is known.
    """
    options = spec.compiler_options(target.platform)
    if target.platform == "gpu" and not target.deviceless and jax.process_count() > 1:
        # Process 0 compiles this alone; it would wait for ever for what others tune (openxla/xla#28959).
        options = {**(options or {}), "xla_gpu_shard_autotuning": False}
    known = Program(name="step", lower=lowered, compiler_options=options, refuse_miscompiled=True)
    known = compiled_program(known, target)
    peak, seconds = peak_and_seconds(known, target)
    if peak is None:
        raise InputError(
            wanted=f"a target whose compiler tells the peak, for a budget of bytes on {target.name}",
            got="no memory analysis",
            do='Compile for target="cpu" or a chip by its name, or use a share: remat="auto:0.25".',
        )
    spec.known[_COMPILED, target] = traced, known.made
    module = known.made and known.made.module
    return Peak(peak, seconds, forward_seconds(module, target.chip) if module is not None and target.chip else ())
