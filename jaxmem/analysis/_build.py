"""Compiles a program for a target, and gathers its report."""

import dataclasses
import warnings
from typing import Any

import jax

from jaxmem._miscompilations import Miscompilation
from jaxmem._units import format_flops
from jaxmem.analysis._compiled import CompiledProgram, compile_program
from jaxmem.analysis._facts import memory_facts
from jaxmem.analysis._jaxpr_flops import JaxprFlops
from jaxmem.analysis._program import Program, known
from jaxmem.analysis._records import Finding, StepTime
from jaxmem.analysis._report import MemoryReport
from jaxmem.analysis.hlo._miscompiled import refusal
from jaxmem.analysis.hlo._reductions import gradient_reductions
from jaxmem.analysis.step_time import NOMINAL_CPU, step_time
from jaxmem.targets import Target, on_target

# How the messages of JAX begin that belong into a report rather than on stderr.
_DONATION_MESSAGE = "Some donated buffers were not usable"


def analyze_program(program: Program, target: Target) -> MemoryReport:
    """Lowers and compiles, where that was not done already, and reports."""
    program = compiled_program(program, target)
    assert program.made is not None
    return build_report(program.made, name=program.name, target=target, program=program)


def compiled_program(program: Program, target: Target) -> Program:
    """The program with its modelled values, and what the target's compiler makes of it."""
    program = program.resolved()
    if program.made is not None:
        return program
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with on_target(target):
            lowered = program.lower()
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


def build_report(made: CompiledProgram, *, name: str, target: Target, program: Program | None = None) -> MemoryReport:
    """The report of what a compiler made of a program; `program` tells what was known before compiling it."""
    known_before = program or Program(name=name, lower=_nothing)
    _refuse_miscompiled(made, known_before)
    facts = memory_facts(made, name, target)
    modelled = known(known_before.modelled_flops)
    recompute = _recomputed(made, modelled, facts.devices)
    shown = facts.memory
    names = known(known_before.saved_names)
    details = made.details(facts.peak_bytes, shown.generated_code_bytes, known_before.kind_of, names)
    time = _time(made, target)
    undone = _without_effect(recompute, modelled, facts.devices)
    wrong = [_wrong_numbers(fault, places) for fault, places in made.miscompiled]
    messages = [
        *(finding.title for finding in wrong),
        *target.notes,
        *facts.notes,
        *made.said,
        *known_before.notes,
        *(modelled.notes if modelled else ()),
        *made.notes,
        *(finding.title for finding in undone),
        *_devices(facts.devices),
    ]
    return MemoryReport(
        name=name,
        target=target.name,
        backend=target.platform,
        jax_version=jax.__version__,
        devices=facts.devices,
        peak_bytes=facts.peak_bytes,
        **dataclasses.asdict(shown),
        argument_provenance=facts.argument_provenance,
        saved_residual_bytes=known(known_before.saved_residual_bytes),
        remat=known_before.remat,
        forward_flops=modelled.forward if modelled else None,
        asked_recompute_flops=modelled.recompute if modelled else None,
        flops=made.flops.flops if made.flops else None,
        recompute_flops=recompute,
        gradient_reduction=known_before.gradient_reduction,
        **_reductions(made, known_before),
        step_seconds=time.seconds if time else None,
        step_time=time,
        fits=facts.fits,
        fits_reason=facts.fits_reason,
        capacity_bytes=facts.capacity_bytes,
        findings=(*wrong, *details.pop("findings", ()), *undone),
        warnings=tuple(dict.fromkeys(messages)),
        **details,
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


def _nothing():
    raise AssertionError("a compiled program is not lowered again")


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


def _without_effect(recompute: int | None, modelled: JaxprFlops | None, devices: int) -> list[Finding]:
    """What was to be recomputed and is not: its residuals are kept after all. How many bytes that is, nobody tells."""
    if recompute is None or modelled is None or devices > 1 or recompute >= modelled.recompute:
        return []
    lost = format_flops(modelled.recompute - recompute)
    return [
        Finding(
            kind="remat_without_effect",
            size_bytes=0,
            title=f"The compiler removed {lost} of the {format_flops(modelled.recompute)} that rematerialisation asks "
            "to recompute: those residuals are kept after all (common-subexpression elimination).",
            cure="Put the layers under a scan, where nothing is merged, or believe the bytes of the target's compiler.",
        )
    ]


def _wrong_numbers(fault: Miscompilation, places: tuple[str, ...]) -> Finding:
    return Finding(
        kind="miscompiled",
        size_bytes=0,
        title=f"This program computes wrong numbers: {fault.compiler} {fault.what} ({fault.name}).",
        evidence=places,
        cure=fault.cure,
    )


def _devices(count: int) -> tuple[str, ...]:
    if count == 1:
        return ()
    return (f"Bytes and compiled FLOPs are per device; modelled FLOPs are of all {count} devices together.",)
