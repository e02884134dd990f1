"""Compiles a program for a target, and gathers its report."""

import dataclasses
import warnings
from typing import Any

import jax

from jaxmem._miscompilations import Miscompilation
from jaxmem._units import format_bytes, format_flops
from jaxmem.analysis._compiled import CompiledProgram, compile_program
from jaxmem.analysis._fits import Fits, judge_fit
from jaxmem.analysis._jaxpr_flops import JaxprFlops
from jaxmem.analysis._program import Program, known
from jaxmem.analysis._records import Finding, StepTime
from jaxmem.analysis._report import MemoryReport
from jaxmem.analysis._sizes import MemoryBytes, argument_bytes, read_memory, used_devices
from jaxmem.analysis.hlo._miscompiled import refusal
from jaxmem.analysis.hlo._reductions import gradient_reductions
from jaxmem.analysis.step_time import NOMINAL_CPU, step_time
from jaxmem.errors import InputError
from jaxmem.targets import Target, check_runs, on_target, unknown_scratch_bytes

_CPU_NOTES = (
    "XLA:CPU's own peak leaves out what loops hold: peak_bytes is arguments + outputs + temporaries - aliases.",
    "XLA:CPU reports no host bytes: host_*_bytes are 0 whatever is offloaded.",
)
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
    facts, time = _facts(made, program.name, target), _time(made, target)
    peak = facts.peak_bytes
    if peak is not None and made.refusal is not None:
        peak = max(peak, (facts.capacity_bytes or 0) + 1)
    return peak, time.seconds if time else None


def build_report(made: CompiledProgram, *, name: str, target: Target, program: Program | None = None) -> MemoryReport:
    """The report of what a compiler made of a program; `program` tells what was known before compiling it."""
    known_before = program or Program(name=name, lower=_nothing)
    _refuse_miscompiled(made, known_before)
    facts = _facts(made, name, target)
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Facts:
    """What the compiler says of memory, and the verdict."""

    devices: int
    memory: MemoryBytes
    argument_provenance: str
    peak_bytes: int | None
    capacity_bytes: int | None
    fits: Fits
    fits_reason: str
    notes: tuple[str, ...]


def _facts(made: CompiledProgram, name: str, target: Target) -> _Facts:
    return _refused(made, target) if made.refusal is not None else _accepted(made, name, target)


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


def _accepted(made: CompiledProgram, name: str, target: Target) -> _Facts:
    devices = used_devices(made.compiled)
    backend = devices[0].platform if devices else target.platform
    if backend != target.platform:
        raise InputError(
            wanted=f"a program for target {target.name!r}, that is for {target.platform}",
            got=f"{name!r}, lowered for {backend}",
            do="Pass the function and its arguments, or leave target out.",
        )
    count = target.device_count if target.deviceless else max(len(devices), 1)
    memory, arguments = read_memory(made.compiled), argument_bytes(made.compiled)
    capacity = target.memory_bytes
    if capacity is not None and backend == "cpu":
        capacity //= count  # virtual CPU devices share the machine's memory
    peak = _peak(memory, backend, made.on_chip_bytes)
    expected = arguments.total - arguments.host if arguments else None
    scratch = unknown_scratch_bytes(made.text or "", target.chip)
    fits, reason = judge_fit(peak, capacity, at_least_bytes=expected, scratch_bytes=scratch)
    chip_notes = check_runs(made.text, target.chip) if target.chip and made.text else ()
    return _Facts(
        devices=count,
        memory=memory or MemoryBytes(argument_bytes=expected),
        argument_provenance="compiled" if memory else "modelled",
        peak_bytes=peak,
        capacity_bytes=capacity,
        fits=fits,
        fits_reason=reason,
        notes=(
            *(_CPU_NOTES if backend == "cpu" else ()),
            *(_elsewhere(memory, made.on_chip_bytes) if memory else ()),
            *(_unavailable(backend) if memory is None else ()),
            *_donation(memory, arguments),
            *_constants(made, peak, memory),
            *chip_notes,
        ),
    )


def _refused(made: CompiledProgram, target: Target) -> _Facts:
    """Of a program that its compiler refused for lack of memory; the assignment that it had made by then is told."""
    error, placed = made.refusal, made.assigned_bytes
    assert error is not None
    available = error.available_bytes or target.memory_bytes
    needed = max(filter(None, (error.needed_bytes, placed.sum_bytes if placed else None)), default=None)
    wants = f"needs {format_bytes(needed)}, which exceeds" if needed is not None else "needs more than"
    what = "where it would have put its buffers, no code" if placed else "nothing but what the program needs"
    return _Facts(
        devices=target.device_count,
        memory=placed or MemoryBytes(compiler_peak_bytes=needed),
        argument_provenance="compiled",
        peak_bytes=needed,
        capacity_bytes=available,
        fits="no",
        fits_reason=f"the compiler refused it: it {wants} the {format_bytes(available)} of a device",
        notes=(f"The compiler stopped for lack of memory: it told {what}.",),
    )


def _nothing():
    raise AssertionError("a compiled program is not lowered again")


def _peak(memory: MemoryBytes | None, backend: str, on_chip_bytes: int) -> int | None:
    """The larger of the sum and the compiler's own peak, unless that is known to be of something else.

    XLA:CPU's leaves out what loops hold. A TPU's adds the buffers in the memory on the chip to those in HBM, and counts
    some values of a loop twice: 84 MiB of a step that takes 10 MiB of HBM. All of them add what lies on the host.
    """
    total = memory.sum_bytes if memory else None
    if memory is None or total is None or backend == "cpu" or on_chip_bytes or memory.any_host_bytes:
        return total
    return max(total, memory.compiler_peak_bytes or 0)


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


def _donation(memory: MemoryBytes | None, arguments) -> list[str]:
    if memory is None or arguments is None or memory.alias_bytes is None or memory.argument_bytes is None:
        return []
    missing = arguments.donated - memory.alias_bytes - (memory.host_alias_bytes or 0)
    held = memory.argument_bytes + (memory.host_argument_bytes or 0)
    unused = max(0, arguments.total - held)  # dropped from the program, so nothing to alias
    if missing <= unused:
        return []
    return [
        f"{format_bytes(missing)} of {format_bytes(arguments.donated)} donated bytes found no output to share a "
        "buffer with: a shape, dtype or sharding differs between input and output."
    ]


def _elsewhere(memory: MemoryBytes, on_chip_bytes: int) -> tuple[str, ...]:
    """What the compiler's own peak counts that is not in the device's memory, where it is larger for that."""
    places = {"memory on the chip": on_chip_bytes, "host memory": memory.any_host_bytes}
    counted = [f"{format_bytes(size)} of {place}" for place, size in places.items() if size]
    if not counted or (memory.compiler_peak_bytes or 0) <= (memory.sum_bytes or 0):
        return ()
    return (
        f"The compiler's own peak counts {' and '.join(counted)} as well: peak_bytes is "
        "arguments + outputs + temporaries - aliases.",
    )


def _constants(made: CompiledProgram, peak: int | None, memory: MemoryBytes | None) -> tuple[str, ...]:
    """Constants are part of the program: no compiler counts them among its temporaries."""
    size = made.assignment.bytes_by_kind().get("constant", 0) if made.assignment else 0
    counted = (peak or 0) - (memory.sum_bytes or 0) if memory else 0
    if size <= max(counted, 0.01 * (peak or 0)):
        return ()
    return (f"{format_bytes(size)} of constants are part of the program, beside peak_bytes: pass them as arguments.",)


def _unavailable(backend: str) -> tuple[str, ...]:
    return (f"Memory analysis is unavailable from {backend}: argument bytes are from shapes and shardings.",)


def _devices(count: int) -> tuple[str, ...]:
    if count == 1:
        return ()
    return (f"Bytes and compiled FLOPs are per device; modelled FLOPs are of all {count} devices together.",)
