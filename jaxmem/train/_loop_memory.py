"""The memory that training takes on this machine, measured beside what its step was compiled to need."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax

from jaxmem._blame import warn
from jaxmem._units import format_bytes
from jaxmem.analysis import analyze
from jaxmem.analysis._sizes import shard_bytes
from jaxmem.errors import MemoryWarning
from jaxmem.targets import DeviceMemory, device_memory
from jaxmem.targets._device_memory import process_memory, restart_process_peak
from jaxmem.train._program import compile_here
from jaxmem.train._step import TrainStep

TOLERANCE = 0.05
# Resident memory also counts what no compiler does: buffers of the runtime's threads, freed pages that the C library
# keeps, Python's objects. On the examples these took 12 to 38 MiB, and a data pipeline may take more.
RESIDENT_SLACK_BYTES = 2**27


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopMemory:
    """The peak of training, measured, beside the peak that the compiler told; bytes of the fullest local device.

    `measured_bytes` leaves out what was there before the first step and is neither state nor batch: it is
    `peak_bytes - (before_bytes - state and batch)`. An allocator's peak is of everything since the process began. The
    kernel's of a process, Linux's VmHWM, begins anew with the first step where the system lets it.

    Args:
      device: JAX's name of the device; on a CPU "this process", Python included, with all its virtual devices.
      measured_by: "memory_stats", the device's allocator, or "resident memory" on a backend that keeps no statistics.
      before_bytes: in use before the first step ran, after it was compiled.
      peak_bytes: the most in use since the process, or training, began.
      measured_bytes: the part of the peak that is training's.
      at_most: training did not raise the peak, so that it took `measured_bytes` or less.
      predicted_bytes: `peak_bytes` of the compiled step's report, for batches like the first.
      ahead_bytes: batches that may wait on the device for their step; not part of the prediction.
      saving_bytes: what a save holds in memory of the host until the state is written; 0 where nothing is saved, or an
        allocator counts the device's memory alone. Not part of the prediction.
    """

    device: str
    measured_by: Literal["memory_stats", "resident memory"]
    before_bytes: int
    peak_bytes: int
    measured_bytes: int
    at_most: bool
    predicted_bytes: int
    ahead_bytes: int = 0
    saving_bytes: int = 0

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON-ready values, and the provenance of the two peaks."""
        provenance = {"measured_bytes": "measured", "predicted_bytes": "compiled"}
        return {**vars(self), "provenance": provenance}

    def __str__(self) -> str:
        """One sentence.

        >>> sizes = {"before_bytes": 2**30, "peak_bytes": 5 * 2**30, "predicted_bytes": 4 * 2**30}
        >>> print(LoopMemory(device="TPU v4", measured_by="memory_stats", measured_bytes=2**32, at_most=False, **sizes))
        peak memory: 4.00 GiB measured (the allocator of TPU v4), 4.00 GiB predicted (compiled)
        """
        most = "at most " if self.at_most else ""
        by, end = f"the allocator of {self.device}", ""
        if self.measured_by == "resident memory":
            by = "roughly: growth of this process, Python included, with state and batch"
            end = f"; the whole process took {format_bytes(self.peak_bytes)}"
        measured, predicted = format_bytes(self.measured_bytes), format_bytes(self.predicted_bytes)
        return f"peak memory: {most}{measured} measured ({by}), {predicted} predicted (compiled){end}"

    @property
    def surprise(self) -> str:
        """Why the two peaks contradict each other, as a paragraph; empty if they do not.

        An allocator counts what the compiler does, so 5 % either way is a contradiction, but for batches that wait.
        Resident memory is judged in one direction only, and with `RESIDENT_SLACK_BYTES` to spare: a process may take
        more for reasons of its own, and less by using again what it had taken before.
        """
        allocator = self.measured_by == "memory_stats"
        slack = self.ahead_bytes + self.saving_bytes + (0 if allocator else RESIDENT_SLACK_BYTES)
        if self.measured_bytes > (1 + TOLERANCE) * self.predicted_bytes + slack and not self.at_most:
            way = "more"
            why = "Arrays that the data or a callback keeps, or batches larger than the first, take memory, too."
            if self.saving_bytes:
                why = f"A save may hold {format_bytes(self.saving_bytes)}. {why}"
        elif allocator and self.measured_bytes < (1 - TOLERANCE) * self.predicted_bytes:
            way = "less"
            why = "Batches were smaller than the first, or the device does not count all that its compiler does."
        else:
            return ""
        off = abs(self.measured_bytes / self.predicted_bytes - 1)
        return f"Training took {off:.0%} {way} memory than its step was compiled for: {self}. {why}"


class Watch:
    """Measures while a loop runs; it begins when the step is compiled and has not run."""

    def __init__(
        self,
        *,
        predicted_bytes: int,
        held_bytes: int,
        ahead_bytes: int,
        devices: Sequence[Any],
        saving_bytes: int = 0,
    ):
        self._predicted_bytes, self._held_bytes, self._ahead_bytes = predicted_bytes, held_bytes, ahead_bytes
        self._devices, self._saving_bytes = devices, saving_bytes
        self._warned = False
        self._before = _in_use(devices)
        if None in self._before and restart_process_peak():
            self._before = _in_use(devices)

    @classmethod
    def of(cls, step: Any, state: Any, batch: Any, *, in_flight: int, saves: bool = False) -> "Watch | None":
        """Compiles the step for its first call, which then compiles no more; None if that tells no bytes.

        Args:
          step: only a `TrainStep` can be compiled before it is called.
          state, batch: of the first call.
          in_flight: how many batches may wait for their step.
          saves: whether the state is saved meanwhile.
        """
        if not isinstance(step, TrainStep):
            return None
        compiled = compile_here(step.spec, state, batch)
        report = analyze(compiled)
        if report.peak_bytes is None or report.argument_bytes is None:
            return None
        jax.block_until_ready((state, batch))  # what made them may hold memory until it is done
        leaves = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        devices = sorted({d for leaf in leaves for d in leaf.sharding.addressable_devices}, key=lambda d: d.id)
        sizes = _batch_bytes(compiled, batch)
        on_host = sum(size for size, leaf in sizes if not isinstance(leaf, jax.Array))
        if not devices or device_memory(devices[0]).in_use_bytes is not None:
            count, saving = 1, 0
        else:  # one process holds the shards of all of them, and batches on the host as well
            count, on_host = len(devices), 0
            saving = _saving_bytes(sum(leaf.nbytes for leaf in leaves)) if saves else 0
        return cls(
            predicted_bytes=count * report.peak_bytes,
            held_bytes=count * (report.argument_bytes - on_host),
            ahead_bytes=count * in_flight * sum(size for size, _ in sizes),
            devices=devices,
            saving_bytes=saving,
        )

    def look(self) -> LoopMemory | None:
        """The memory until now, with a MemoryWarning once if it contradicts the prediction; None if nothing tells."""
        now = _in_use(self._devices)
        seen = [self._compared(self._before[name], now[name]) for name in now if name in self._before]
        fullest = max(seen, key=lambda memory: memory.measured_bytes, default=None)
        if fullest is not None and not self._warned and (surprise := fullest.surprise):
            self._warned = True
            warn(surprise, MemoryWarning)
        return fullest

    def _compared(self, before: DeviceMemory, now: DeviceMemory) -> LoopMemory:
        assert before.in_use_bytes is not None and now.peak_bytes is not None
        others = max(before.in_use_bytes - self._held_bytes, 0)
        return LoopMemory(
            device=now.device,
            measured_by="resident memory" if now.device == "this process" else "memory_stats",
            before_bytes=before.in_use_bytes,
            peak_bytes=now.peak_bytes,
            measured_bytes=now.peak_bytes - others,
            at_most=now.peak_bytes == before.peak_bytes,
            predicted_bytes=self._predicted_bytes,
            ahead_bytes=self._ahead_bytes,
            saving_bytes=self._saving_bytes,
        )


def _in_use(devices: Sequence[Any]) -> Mapping[Any, DeviceMemory]:
    """The memory of each device whose allocator keeps statistics, or of the process where none does."""
    found = {device: device_memory(device) for device in devices} or {None: device_memory()}
    if all(memory.in_use_bytes is None for memory in found.values()):
        found = {None: process_memory()}
    return {name: m for name, m in found.items() if m.in_use_bytes is not None and m.peak_bytes is not None}


def _saving_bytes(state_bytes: int) -> int:
    """At most, what a save holds: the state once more, and what is compressed and written at a time.

    Measured on one CPU: 3 to 4 times a state of 48 MiB, 1.2 times one of 192 MiB, 1.04 times one of 768 MiB.
    """
    return state_bytes + min(2 * state_bytes, 2**27)


def _batch_bytes(compiled: jax.stages.Compiled, batch: Any) -> list[tuple[int, Any]]:
    """(bytes on one device, leaf) for each leaf of a batch."""
    (_, infos), _ = compiled.args_info
    (_, shardings), _ = compiled.input_shardings
    shardings = jax.tree.leaves(shardings, is_leaf=lambda leaf: leaf is None)
    leaves = zip(jax.tree.leaves(infos), shardings, jax.tree.leaves(batch), strict=True)
    return [(shard_bytes(info, sharding), leaf) for info, sharding, leaf in leaves]
