"""A buffer assignment: which value lies where in memory, and from when to when."""

import dataclasses
import functools
import itertools
from collections import Counter
from typing import Literal, NamedTuple

from jaxmem.analysis.assignment._sweep import Span, Sweep, sweep

AllocationKind = Literal["parameter", "output", "temp", "constant", "thread_local"]
Source = Literal["text", "proto", "liveness"]

_TPU_SPACES = {0: "device", 1: "vmem", 2: "smem", 5: "host"}
# Colour 1 is the GPU's memory for collectives, which lies in the device's memory too.
_SPACES = {0: "device", 1: "device", 5: "host"}


class Value(NamedTuple):
    """One logical buffer: what one instruction defines at one index of its result.

    Args:
      name: of the instruction, as in the HLO text.
      index: of the element in a tuple result: (2,) for `while.7{2}`; () of an array, or of the tuple's own pointers.
      size_bytes: with padding.
      allocation, offset_bytes: where it lies.
      layout: its HLO type, with layout and tiles: "bf16[8,128]{1,0:T(8,128)(2,1)}".
      color: its memory space as the compiler numbers it; see `Assignment.memory_space`.
      start, end: first and last position of the schedule at which it is alive, both included; -1 where it lives
        within one instruction only (`thread_local`).
    """

    name: str
    index: tuple[int, ...]  # pyright: ignore[reportIncompatibleMethodOverride]  # no one searches a record
    size_bytes: int
    allocation: int
    offset_bytes: int
    layout: str
    color: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Allocation:
    """One block of memory, shared by values that are not alive together or that are the same bytes.

    Args:
      number: of the allocation; a `Value.allocation` is one of these.
      size_bytes: of the whole block.
      kind: "parameter" (also where an output reuses a donated one), "output", "temp", "constant" or "thread_local".
      parameter: number of the entry's parameter that lies in it, None for other kinds.
      shape_index: of that parameter's element in a tuple.
      live_out: whether an output may lie in it.
      color: its memory space.
      values: in the order of the source.
    """

    number: int
    size_bytes: int
    kind: AllocationKind
    parameter: int | None = None
    shape_index: tuple[int, ...] = ()
    live_out: bool = False
    color: int = 0
    values: tuple[Value, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """Every buffer of a compiled program.

    Args:
      allocations: as the compiler numbers them, on-chip and host memories included.
      schedule: instruction names in the order in which they run; the condition and the body of a loop stand once,
        before their `while`. A position is an index in it.
      source: "text" (a dump), "proto" (XLA:CPU's own message, ranges from the HLO) or "liveness" (all from the HLO).
      platform: "cpu", "gpu" or "tpu"; empty where only "not a TPU" is known.
    """

    allocations: tuple[Allocation, ...]
    schedule: tuple[str, ...]
    source: Source
    platform: str = ""

    def memory_space(self, color: int) -> str:
        """ "device", "host", an on-chip memory ("vmem", "smem"), or "color_7" where it has no name."""
        spaces = _TPU_SPACES if self.platform == "tpu" else _SPACES
        return spaces.get(color, f"color_{color}")

    @functools.cached_property
    def temps(self) -> tuple[Allocation, ...]:
        """The temporary allocations in device memory: usually one."""
        return tuple(
            a for a in self.allocations if a.kind == "temp" and self.memory_space(a.color) == "device" and a.size_bytes
        )

    @property
    def temp_bytes(self) -> int:
        """Device memory for temporaries."""
        return sum(a.size_bytes for a in self.temps)

    @property
    def host_temp_bytes(self) -> int:
        """Host memory for temporaries: what is offloaded."""
        return sum(a.size_bytes for a in self.allocations if a.kind == "temp" and self.memory_space(a.color) == "host")

    @functools.cached_property
    def bases(self) -> dict[int, int]:
        """Per allocation, by its number, where it begins if all of them lay one behind the other."""
        starts = itertools.accumulate((a.size_bytes for a in self.allocations), initial=0)
        return dict(zip((a.number for a in self.allocations), starts, strict=False))

    @property
    def used_temp_bytes(self) -> int:
        """Bytes of the temporary allocations that some value uses at some time: the union of all their places."""
        return self._swept([v._replace(start=0, end=0) for a in self.temps for v in a.values]).peak_bytes

    @functools.cached_property
    def temp_sweep(self) -> Sweep:
        """Bytes of the temporary allocations in which a value is alive, over the schedule."""
        return self._swept([v for a in self.temps for v in a.values if v.start >= 0])

    def _swept(self, values: list[Value]) -> Sweep:
        spans = [Span(self.bases[v.allocation] + v.offset_bytes, v.size_bytes, v.start, v.end, 0) for v in values]
        return sweep(spans, 1)

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of device memory per kind of allocation; thread-local ones, which live on a stack, left out."""
        total: Counter[str] = Counter()
        for a in self.allocations:
            if a.kind != "thread_local" and self.memory_space(a.color) == "device":
                total[a.kind] += a.size_bytes
        return dict(total)
