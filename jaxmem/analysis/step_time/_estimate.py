"""`step_time`: the schedule of a module, walked once, each instruction at what bounds it."""

import re

from jaxmem.analysis._records import StepTime
from jaxmem.analysis.hlo._collectives import device_count, is_collective, sent_bytes
from jaxmem.analysis.hlo._module import Computation, Instruction, Module
from jaxmem.analysis.hlo._parse import parse_hlo
from jaxmem.analysis.hlo._walk import CALLS, Walk, plus
from jaxmem.analysis.step_time._bytes import FREE, FUSIONS, Traffic, Traffics, started_bytes
from jaxmem.analysis.step_time._chip import ChipSpeed
from jaxmem.analysis.step_time._work import Seconds, Work, cost_estimate
from jaxmem.targets import Chip

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
# The compiler writes the largest int64 where its model has no answer; a year is 5e16 cycles.
_NO_CYCLES = 2**53
# Custom calls that are notes of the compiler to itself.
_NOTES = re.compile(r"AllocateBuffer|CreateBuffer|ConcatBitcast|Sharding|Annotat|Pin$|Unpin$|Assume|MoveTo")


def step_time(module: str | Module, chip: Chip | ChipSpeed) -> StepTime:
    """The time that one call of a compiled program takes on one device of `chip`: an estimate, nothing is run.

    On a TPU whose clock is known: the compiler's own `estimated_cycles`; what has none (Pallas kernels, other custom
    calls, some fusions) is filled by the roofline. Elsewhere all is roofline: each instruction takes the larger of its
    arithmetic at peak rate and its bytes at peak bandwidth, so that real programs take longer. Loops are multiplied
    out, of a conditional the slowest branch counts, and an asynchronous copy or collective costs what is not hidden
    behind what runs between its start and its end. The time to launch kernels is left out.

    Args:
      module: optimised, scheduled HLO: `Compiled.as_text()`, or parsed.
      chip: a row of the chip table, or its rates.

    Returns:
      `compute_seconds`, `memory_seconds` and `collective_seconds` sum to `seconds`: what each instruction is bound by.

    Raises:
      ValueError: the text has no entry computation.

    >>> text = '''HloModule m, is_scheduled=true
    ...
    ... ENTRY %main (x: f32[1000,1000]) -> f32[1000,1000] {
    ...   %x = f32[1000,1000]{1,0} parameter(0)
    ...   ROOT %dot = f32[1000,1000]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}
    ... }
    ... '''
    >>> from jaxmem.analysis.step_time import NOMINAL_CPU
    >>> time = step_time(text, NOMINAL_CPU)
    >>> time.seconds, time.method
    (0.02, 'roofline')
    """
    estimate = _Estimate(parse_hlo(module) if isinstance(module, str) else module, ChipSpeed.of(chip))
    total = estimate.walk.entry()
    by_cycles = estimate.cycles_seen
    return StepTime(
        seconds=total.seconds,
        method="compiler_cycles" if by_cycles else "roofline",
        filled_share=(total.filled / total.seconds if total.seconds else 0.0) if by_cycles else 1.0,
        compute_seconds=total.compute,
        memory_seconds=total.memory,
        collective_seconds=total.collective,
        notes=estimate.notes(),
    )


class _Estimate:
    """Seconds of a module's instructions on a chip."""

    def __init__(self, module: Module, chip: ChipSpeed):
        self.chip, self.devices = chip, device_count(module)
        self.traffic, self.work = Traffics(module), Work(module, chip)
        self.walk = Walk(module, Seconds(), self._run, size=lambda cost: cost.seconds)
        self.cycles_seen = False
        self.unpriced: set[str] = set()

    def notes(self) -> tuple[str, ...]:
        """What the estimate leaves out."""
        notes = [self.chip.note] if self.chip.note else []
        if self.walk.endless:
            notes.append(f"Step time: {len(self.walk.endless)} loop(s) with an unknown trip count are counted once.")
        if self.unpriced:
            notes.append(
                f"Step time leaves out {', '.join(sorted(self.unpriced))}: {self.chip.name}'s rate is unknown."
            )
        return tuple(notes)

    def _run(self, computation: Computation) -> Seconds:
        """A scheduled computation: what was started is waited for where it is not done by then."""
        total = Seconds()
        # When each asynchronous engine is free, and when what was started is done and what it is bound by.
        free: dict[str, float] = {}
        pending: dict[str, tuple[float, str]] = {}
        for instruction in computation.instructions.values():
            opcode = instruction.opcode
            if opcode.endswith("-start"):
                cost = self._instruction(computation, instruction)
                engine = max(("compute", "memory", "collective"), key=lambda name: getattr(cost, name))
                free[engine] = max(free.get(engine, 0.0), total.seconds) + cost.seconds
                pending[instruction.name] = (free[engine], engine)
            elif opcode.endswith("-done"):
                done, engine = pending.get(next(iter(instruction.operands), ""), (0.0, "memory"))
                waited = max(0.0, done - total.seconds)
                total = plus(total, Seconds(**{engine: waited}, filled=waited))
            elif opcode not in FREE and not opcode.endswith("-update"):
                total = plus(total, self._instruction(computation, instruction))
        return total

    def _instruction(self, computation: Computation, instruction: Instruction) -> Seconds:
        opcode = instruction.opcode
        if opcode in CALLS and opcode not in FUSIONS:
            return self.walk.called(computation, instruction)
        if opcode == "custom-call" and _NOTES.search(instruction.attribute("custom_call_target") or ""):
            return Seconds()
        if is_collective(opcode):
            return self._collective(computation, instruction)
        compute = self.work.of(computation, instruction)
        memory = self._memory(self._moved(computation, instruction))
        cycles = estimated_cycles(instruction) if self.chip.clock_hertz else None
        if cycles is not None and self.chip.clock_hertz:
            self.cycles_seen = True
            seconds, filled = cycles / self.chip.clock_hertz, 0.0
        else:
            seconds = filled = max(compute, memory)
        if compute > memory:
            return Seconds(compute=seconds, filled=filled)
        return Seconds(memory=seconds, filled=filled)

    def _moved(self, computation: Computation, instruction: Instruction) -> Traffic:
        if instruction.opcode in ("copy-start", "slice-start"):
            return started_bytes(instruction)
        stated = cost_estimate(instruction)
        return Traffic(device=stated[1]) if stated and stated[1] else self.traffic.of(computation, instruction)

    def _memory(self, moved: Traffic) -> float:
        device = moved.device / self.chip.hbm_bytes_per_second
        if not moved.host:
            return device
        if not self.chip.host_bytes_per_second:
            self.unpriced.add("copies to and from the host")
            return device
        return max(device, moved.host / self.chip.host_bytes_per_second)

    def _collective(self, computation: Computation, instruction: Instruction) -> Seconds:
        rate = self.chip.interconnect_bytes_per_second
        if not rate:
            self.unpriced.add("collectives")
            return Seconds()
        seconds = sent_bytes(computation, instruction, self.devices) / rate
        return Seconds(collective=seconds, filled=seconds)


def estimated_cycles(instruction: Instruction) -> int | None:
    """The TPU compiler's own estimate of an instruction; None where it has none."""
    found = _CYCLES.search(instruction.rest)
    cycles = int(found.group(1)) if found else None
    return cycles if cycles is not None and cycles < _NO_CYCLES else None
