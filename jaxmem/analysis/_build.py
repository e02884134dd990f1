"""Compiles a program for a target, and gathers its report."""

import dataclasses
import warnings
from typing import Any

import jax

from jaxmem.analysis._asked import asked_of
from jaxmem.analysis._compiled import CompiledProgram, compile_program
from jaxmem.analysis._details import details
from jaxmem.analysis._draws import how_it_draws
from jaxmem.analysis._facts import memory_facts
from jaxmem.analysis._jaxpr_flops import JaxprFlops
from jaxmem.analysis._phases import told_phases
from jaxmem.analysis._program import Program, known
from jaxmem.analysis._records import Setting, StepTime
from jaxmem.analysis._report import MemoryReport
from jaxmem.analysis.findings._compiler import without_effect, wrong_numbers
from jaxmem.analysis.findings._waiting import unrolled_layers
from jaxmem.analysis.hlo._miscompiled import refusal
from jaxmem.analysis.hlo._reductions import gradient_reductions
from jaxmem.analysis.step_time import NOMINAL_CPU, step_time
from jaxmem.targets import Target, on_target

# How the messages of JAX begin that belong into a report rather than on stderr.
_DONATION_MESSAGE = "Some donated buffers were not usable"


def analyze_program(program: Program, target: Target) -> MemoryReport:
    """Lowers and compiles, where that was not done already, and reports."""
    return build_report(compiled_program(program, target), target)


def compiled_program(program: Program, target: Target) -> Program:
    """The program with its modelled values, and what the target's compiler makes of it."""
    program = program.resolved()
    if program.made is not None:
        return program
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lowered = program.lower
        if callable(lowered):
            with on_target(target):
                lowered = lowered()
        made = compile_program(lowered, target, program.compiler_options)
    said = []
    for warning in caught:
        if str(warning.message).startswith(_DONATION_MESSAGE):
            said.append(" ".join(str(warning.message).split()))
        else:  # not ours to keep
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return dataclasses.replace(program, made=dataclasses.replace(made, said=tuple(said)))


def peak_and_seconds(program: Program, target: Target) -> tuple[int | None, float | None]:
    """The peak and the estimated seconds that the report of a compiled program tells, without the rest of it.

    What was refused for lack of memory needs more than there is, whatever the compiler counted.
    """
    made = program.made
    assert made is not None
    _refuse_miscompiled(made, program)
    facts, time = memory_facts(made, program.name, target), _time(made, target)
    peak = facts.peak_bytes
    if peak is not None and made.refusal is not None:
        peak = max(peak, (facts.capacity_bytes or 0) + 1)
    return peak, time.seconds if time else None


def build_report(program: Program, target: Target) -> MemoryReport:
    """The report of a compiled program."""
    made = program.made
    assert made is not None
    _refuse_miscompiled(made, program)
    facts = memory_facts(made, program.name, target)
    jaxpr = known(program.jaxpr)
    modelled = known(program.modelled_flops)
    recompute = _recomputed(made, modelled, facts.devices)
    shown, names = facts.memory, known(program.saved_names)
    asked = asked_of(
        target,
        config=program.config,
        function=program.name,
        jit=program.jit,
        parameters=program.parameters,
        peak_bytes=facts.peak_bytes,
        capacity_bytes=facts.capacity_bytes,
        recomputes=bool(recompute or (modelled and modelled.recompute)),
        **how_it_draws(jaxpr),
    )
    buffers = details(made, facts.peak_bytes, shown.generated_code_bytes, asked, program.kind_of, names, jaxpr)
    time = _time(made, target)
    phases, fits, fits_reason = told_phases(program.phases, facts)
    undone = without_effect(recompute, modelled.recompute) if modelled and facts.devices == 1 else []
    wrong = [wrong_numbers(fault, places) for fault, places in made.miscompiled]
    messages = [
        *(finding.title for finding in wrong),
        *target.notes,
        *facts.notes,
        *made.said,
        *program.notes,
        *(modelled.notes if modelled else ()),
        *made.notes,
        *(finding.title for finding in undone),
        *_devices(facts.devices),
    ]
    return MemoryReport(
        name=program.name,
        target=target.name,
        backend=target.platform,
        jax_version=jax.__version__,
        devices=facts.devices,
        peak_bytes=facts.peak_bytes,
        **dataclasses.asdict(shown),
        argument_provenance=facts.argument_provenance,
        saved_residual_bytes=known(program.saved_residual_bytes),
        settings=tuple(Setting(name=name, value=value) for name, value in program.settings.items()),
        config=program.config.to_json() if program.config else "",
        remat=program.remat,
        **({name: getattr(program.settled, name) for name in ("order", "roll", "random")} if program.settled else {}),
        generator=program.generator,
        forward_flops=modelled.forward if modelled else None,
        asked_recompute_flops=modelled.recompute if modelled else None,
        flops=made.flops.flops if made.flops else None,
        recompute_flops=recompute,
        gradient_reduction=program.gradient_reduction,
        **_reductions(made, program),
        step_seconds=time.seconds if time else None,
        step_time=time,
        compile_seconds=made.seconds,
        fits=fits,
        fits_reason=fits_reason,
        phases=phases,
        capacity_bytes=facts.capacity_bytes,
        findings=(*wrong, *buffers.pop("findings", ()), *undone, *unrolled_layers(known(program.unrolled), asked)),
        warnings=tuple(dict.fromkeys(messages)),
        notes=tuple(dict.fromkeys(program.news)),
        **buffers,
    )


def _refuse_miscompiled(made: CompiledProgram, program: Program) -> None:
    if program.refuse_miscompiled and made.miscompiled:
        raise refusal(made.miscompiled, program.name)


def _reductions(made: CompiledProgram, program: Program) -> dict[str, Any]:
    if made.module is None or program.shards == 1 or not program.gradients:
        return {}
    found = gradient_reductions(made.module, program.gradients, program.shards)
    return {"gradient_reductions": round(found.times, 3), "gradient_reduction_bytes": found.size_bytes}


def _time(made: CompiledProgram, target: Target) -> StepTime | None:
    chip = target.chip or (NOMINAL_CPU if target.platform == "cpu" else None)
    return step_time(made.module, chip) if made.module is not None and chip is not None else None


def _recomputed(made: CompiledProgram, modelled: JaxprFlops | None, devices: int) -> int | None:
    flops = made.flops
    if flops is None:
        return None
    if modelled is None or devices > 1:
        return flops.recompute_flops
    # Merging a recomputation with its first computation may leave the one labelled as recomputed:
    # then the forward pass lacks as much as the label claims too much.
    merged = max(0, modelled.forward - flops.forward_flops)
    return max(0, flops.recompute_flops - merged)


def _devices(count: int) -> tuple[str, ...]:
    if count == 1:
        return ()
    return (f"Bytes and compiled FLOPs are per device; modelled FLOPs are of all {count} devices together.",)
