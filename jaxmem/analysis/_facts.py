"""What a compiler says of a program's memory, the verdict whether it fits, and what these bytes do not show."""

import dataclasses

from jaxmem._units import format_bytes
from jaxmem.analysis._compiled import CompiledProgram
from jaxmem.analysis._fits import Fits, judge_fit
from jaxmem.analysis._sizes import MemoryBytes, argument_bytes, read_memory, used_devices
from jaxmem.errors import InputError
from jaxmem.targets import Target, check_runs, unknown_scratch_bytes

_CPU_NOTES = (
    "XLA:CPU's own peak leaves out what loops hold: peak_bytes is arguments + outputs + temporaries - aliases.",
    "XLA:CPU reports no host bytes: host_*_bytes are 0 whatever is offloaded.",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryFacts:
    """What the compiler says of memory, and the verdict."""

    devices: int
    memory: MemoryBytes
    argument_provenance: str
    peak_bytes: int | None
    capacity_bytes: int | None
    fits: Fits
    fits_reason: str
    notes: tuple[str, ...]


def memory_facts(made: CompiledProgram, name: str, target: Target) -> MemoryFacts:
    """Of a program that compiled, or that its compiler refused."""
    return _refused(made, target) if made.refusal is not None else _accepted(made, name, target)


def _accepted(made: CompiledProgram, name: str, target: Target) -> MemoryFacts:
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
    return MemoryFacts(
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


def _refused(made: CompiledProgram, target: Target) -> MemoryFacts:
    """Of a program that its compiler refused for lack of memory; the assignment that it had made by then is told."""
    error, placed = made.refusal, made.assigned_bytes
    assert error is not None
    available = error.available_bytes or target.memory_bytes
    needed = max(filter(None, (error.needed_bytes, placed.sum_bytes if placed else None)), default=None)
    wants = f"needs {format_bytes(needed)}, which exceeds" if needed is not None else "needs more than"
    what = "where it would have put its buffers, no code" if placed else "nothing but what the program needs"
    return MemoryFacts(
        devices=target.device_count,
        memory=placed or MemoryBytes(compiler_peak_bytes=needed),
        argument_provenance="compiled",
        peak_bytes=needed,
        capacity_bytes=available,
        fits="no",
        fits_reason=f"the compiler refused it: it {wants} the {format_bytes(available)} of a device",
        notes=(f"The compiler stopped for lack of memory: it told {what}.",),
    )


def _peak(memory: MemoryBytes | None, backend: str, on_chip_bytes: int) -> int | None:
    """The larger of the sum and the compiler's own peak, unless that is known to be of something else.

    XLA:CPU's leaves out what loops hold. A TPU's adds the buffers in the memory on the chip to those in HBM, and counts
    some values of a loop twice: 84 MiB of a step that takes 10 MiB of HBM. All of them add what lies on the host.
    """
    total = memory.sum_bytes if memory else None
    if memory is None or total is None or backend == "cpu" or on_chip_bytes or memory.any_host_bytes:
        return total
    return max(total, memory.compiler_peak_bytes or 0)


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
