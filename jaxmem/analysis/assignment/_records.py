"""A buffer assignment: which value lies where in memory, and from when to when."""

import dataclasses
import functools
from collections import Counter
from typing import Literal, NamedTuple

from jaxmem.analysis.assignment._union import live_curve, union_bytes

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
    def used_temp_bytes(self) -> int:
        """Bytes of the temporary allocations that some value uses at some time: the union of all their places."""
        return sum(union_bytes((v.offset_bytes, v.size_bytes) for v in a.values) for a in self.temps)

    @functools.cached_property
    def live_temp_curve(self) -> tuple[int, ...]:
        """Per position, the bytes of `temps` in which a value is alive. Bytes that values share count once."""
        length = len(self.schedule)
        curves = [
            live_curve([(v.start, v.end, v.offset_bytes, v.size_bytes) for v in a.values], length) for a in self.temps
        ]
        return tuple(map(sum, zip(*curves, strict=True))) if curves else (0,) * length

    def live_temp_bytes(self, position: int) -> int:
        """Bytes of device memory for temporaries in which a value is alive at `position`."""
        return self.live_temp_curve[position]

    @functools.cached_property
    def peak_position(self) -> int:
        """The first position at which most temporary bytes are alive; the other kinds of bytes are there throughout."""
        curve = self.live_temp_curve
        return curve.index(max(curve)) if curve else 0

    @property
    def peak_temp_bytes(self) -> int:
        """Temporary bytes alive at `peak_position`; what is left to `temp_bytes` lies unused between them."""
        return max(self.live_temp_curve, default=0)

    def live_temps(self, position: int) -> tuple[Value, ...]:
        """The temporary values in device memory alive at `position`, largest first; some may share bytes."""
        alive = [v for a in self.temps for v in a.values if v.start <= position <= v.end]
        return tuple(sorted(alive, key=lambda v: -v.size_bytes))

    def bytes_by_kind(self) -> dict[str, int]:
        """Bytes of device memory per kind of allocation; thread-local ones, which live on a stack, left out."""
        total: Counter[str] = Counter()
        for a in self.allocations:
            if a.kind != "thread_local" and self.memory_space(a.color) == "device":
                total[a.kind] += a.size_bytes
        return dict(total)
