"""Compiles a program for a target, and gathers its report."""

import warnings

import jax

from jaxmem.analysis._fits import judge_fit
from jaxmem.analysis._hlo_flops import HloFlops, hlo_flops
from jaxmem.analysis._jaxpr_flops import JaxprFlops
from jaxmem.analysis._memory import MemoryBytes, argument_bytes, read_memory, used_devices
from jaxmem.analysis._program import Program, known
from jaxmem.analysis._report import MemoryReport
from jaxmem.analysis._units import format_bytes, format_flops
from jaxmem.errors import DoesNotFitError, InputError
from jaxmem.targets import Target, check_runs, compile_lowered, on_target, unknown_scratch_bytes

_CPU_NOTES = (
    "XLA:CPU's own peak leaves out what loops hold: peak_bytes is arguments + outputs + temporaries - aliases.",
    "XLA:CPU reports no host bytes: host_*_bytes are 0 whatever is offloaded.",
)
# How the messages of JAX begin that belong into a report rather than on stderr.
_DONATION_MESSAGE = "Some donated buffers were not usable"


def analyze_program(program: Program, target: Target) -> MemoryReport:
    """Lowers, compiles and reports."""
    program = program.resolved()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with on_target(target):
            lowered = program.lower()
        try:
            compiled = compile_for(lowered, target, program.compiler_options)
        except DoesNotFitError as error:
            compiled = error
    said = []
    for warning in caught:
        if str(warning.message).startswith(_DONATION_MESSAGE):
            said.append(" ".join(str(warning.message).split()))
        else:  # not ours to keep
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if isinstance(compiled, DoesNotFitError):
        return refused_report(compiled, name=program.name, target=target, program=program, notes=tuple(said))
    return build_report(compiled, name=program.name, target=target, program=program, notes=tuple(said))


def compile_for(lowered, target: Target, compiler_options=None):
    """`lowered` compiled with the target's options; options of the program's own win."""
    return compile_lowered(lowered, target, compiler_options)


def refused_report(
    error: DoesNotFitError, *, name: str, target: Target, program: Program | None = None, notes: tuple[str, ...] = ()
) -> MemoryReport:
    """The report of a program that its compiler refused for lack of memory: what it needs, and what there is."""
    needed, available = error.needed_bytes, error.available_bytes or target.memory_bytes
    modelled = known(program.modelled_flops) if program else None
    messages = [
        *target.notes,
        "The compiler stopped, so it told nothing but what the program needs: other bytes and FLOPs are unknown.",
        *notes,
        *(program.notes if program else ()),
        *(modelled.notes if modelled else ()),
        *_devices(target.device_count),
    ]
    wants = f"needs {format_bytes(needed)}, which exceeds" if needed is not None else "needs more than"
    return MemoryReport(
        name=name,
        target=target.name,
        backend=target.platform,
        jax_version=jax.__version__,
        devices=target.device_count,
        peak_bytes=needed,
        compiler_peak_bytes=needed,
        saved_residual_bytes=known(program.saved_residual_bytes) if program else None,
        remat=program.remat if program else "none",
        forward_flops=modelled.forward if modelled else None,
        asked_recompute_flops=modelled.recompute if modelled else None,
        fits="no",
        fits_reason=f"the compiler refused it: it {wants} the {format_bytes(available)} of a device",
        capacity_bytes=available,
        warnings=tuple(dict.fromkeys(messages)),
    )


def build_report(
    compiled, *, name: str, target: Target, program: Program | None = None, notes: tuple[str, ...] = ()
) -> MemoryReport:
    """The report of a compiled program; `program` tells what was known before compiling it."""
    devices = used_devices(compiled)
    backend = devices[0].platform if devices else target.platform
    if backend != target.platform:
        raise InputError(
            wanted=f"a program for target {target.name!r}, that is for {target.platform}",
            got=f"{name!r}, lowered for {backend}",
            do="Pass the function and its arguments, or leave target out.",
        )
    count = max(len(devices), 1)
    memory = read_memory(compiled)
    arguments = argument_bytes(compiled)
    modelled = known(program.modelled_flops) if program else None
    text = _hlo_text(compiled)
    flops, flop_notes = _compiled_flops(text)
    chip_notes = check_runs(text, target.chip) if target.chip and text else ()
    recompute = _recomputed(flops, modelled, count)
    capacity = target.memory_bytes
    if capacity is not None and backend == "cpu":
        capacity //= count  # virtual CPU devices share the machine's memory
    peak = _peak(memory, backend)
    expected = arguments.total if arguments else None
    scratch = unknown_scratch_bytes(text or "", target.chip)
    fits, reason = judge_fit(peak, capacity, at_least_bytes=expected, scratch_bytes=scratch)
    shown = memory or MemoryBytes(argument_bytes=expected)
    messages = [
        *target.notes,
        *(_CPU_NOTES if backend == "cpu" else ()),
        *(_unavailable(backend) if memory is None else ()),
        *notes,
        *(program.notes if program else ()),
        *_donation(memory, arguments),
        *chip_notes,
        *(modelled.notes if modelled else ()),
        *flop_notes,
        *_merged(recompute, modelled, count),
        *_devices(count),
    ]
    return MemoryReport(
        name=name,
        target=target.name,
        backend=backend,
        jax_version=jax.__version__,
        devices=count,
        peak_bytes=peak,
        compiler_peak_bytes=shown.compiler_peak_bytes,
        argument_bytes=shown.argument_bytes,
        output_bytes=shown.output_bytes,
        temp_bytes=shown.temp_bytes,
        alias_bytes=shown.alias_bytes,
        host_argument_bytes=shown.host_argument_bytes,
        host_output_bytes=shown.host_output_bytes,
        host_temp_bytes=shown.host_temp_bytes,
        host_alias_bytes=shown.host_alias_bytes,
        generated_code_bytes=shown.generated_code_bytes,
        argument_provenance="compiled" if memory else "modelled",
        saved_residual_bytes=known(program.saved_residual_bytes) if program else None,
        remat=program.remat if program else "none",
        forward_flops=modelled.forward if modelled else None,
        asked_recompute_flops=modelled.recompute if modelled else None,
        flops=flops.flops if flops else None,
        recompute_flops=recompute,
        fits=fits,
        fits_reason=reason,
        capacity_bytes=capacity,
        warnings=tuple(dict.fromkeys(messages)),
    )


def _peak(memory: MemoryBytes | None, backend: str) -> int | None:
    total = memory.sum_bytes if memory else None
    if memory is None or total is None or backend == "cpu":
        return total
    return max(total, memory.compiler_peak_bytes or 0)


def _hlo_text(compiled) -> str | None:
    try:
        return compiled.as_text()
    except Exception:  # a backend that keeps its program to itself
        return None


def _compiled_flops(text: str | None) -> tuple[HloFlops | None, tuple[str, ...]]:
    if not text:
        return None, ("Compiled FLOPs are unavailable: this backend does not show its program.",)
    try:
        flops = hlo_flops(text)
    except ValueError as error:
        return None, (f"Compiled FLOPs are unavailable: {error}.",)
    return flops, flops.notes


def _recomputed(flops: HloFlops | None, modelled: JaxprFlops | None, devices: int) -> int | None:
    if flops is None:
        return None
    if modelled is None or devices > 1:
        return flops.recompute_flops
    # Merging a recomputation with its first computation may leave the one labelled as recomputed:
    # then the forward pass lacks as much as the label claims too much.
    merged = max(0, modelled.forward - flops.forward_flops)
    return max(0, flops.recompute_flops - merged)


def _merged(recompute: int | None, modelled: JaxprFlops | None, devices: int) -> list[str]:
    if recompute is None or modelled is None or devices > 1 or recompute >= modelled.recompute:
        return []
    lost = format_flops(modelled.recompute - recompute)
    return [
        f"The compiler removed {lost} of the {format_flops(modelled.recompute)} that rematerialisation asks to "
        "recompute: those residuals are kept after all (common-subexpression elimination)."
    ]


def _donation(memory: MemoryBytes | None, arguments) -> list[str]:
    if memory is None or arguments is None or memory.alias_bytes is None or memory.argument_bytes is None:
        return []
    missing = arguments.donated - memory.alias_bytes
    unused = max(0, arguments.total - memory.argument_bytes)  # dropped from the program, so nothing to alias
    if missing <= unused:
        return []
    return [
        f"{format_bytes(missing)} of {format_bytes(arguments.donated)} donated bytes found no output to share a "
        "buffer with: a shape, dtype or sharding differs between input and output."
    ]


def _unavailable(backend: str) -> tuple[str, ...]:
    return (f"Memory analysis is unavailable from {backend}: argument bytes are from shapes and shardings.",)


def _devices(count: int) -> tuple[str, ...]:
    if count == 1:
        return ()
    return (f"Bytes and compiled FLOPs are per device; modelled FLOPs are of all {count} devices together.",)
