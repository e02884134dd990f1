"""What a report holds about single buffers, their layers, the timeline, and what to do: plain records."""

import dataclasses
from typing import Literal

KINDS = (
    "parameters",
    "optimizer_state",
    "gradients",
    "accumulators",
    "activations",
    "state",
    "batch",
    "arguments",
    "outputs",
    "collectives",
    "constants",
    "workspace",
    "code",
    "fragmentation",
    "unattributed",
)
"""The kinds that bytes are counted under.

`arguments` are those of a plain function whose kinds nobody declared; `fragmentation` is what lies
unused between the buffers of the temporary allocation at its peak.
"""

Phase = Literal["forward", "backward", "recompute", "update", ""]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Buffer:
    """One buffer of the compiled program, and where it comes from.

    Args:
      name: the value in the optimised HLO, `fusion.12{0}`.
      kind: one of `KINDS`.
      layer: path of the module, or of the scan, that computes it: "GPT/blocks/mlp_in"; empty outside any.
      phase: "forward", "backward", "recompute" or "update" (optimizer); empty where unknown.
      path: of the argument or output that it holds: "state.params['embed']['embedding']"; empty otherwise.
      saved_name: the `checkpoint_name` under which it is saved; empty where it has none.
      op: the operation that computes it, in JAX's words: "dot_general"; of an argument "parameter".
      op_name: JAX's whole scope path of that operation.
      source: "gpt.py:51" of the user's line, `source_file` its whole path, `function` the function there.
      shape: "f32[8,1024,768]"; `layout` as the compiler writes it, tiles included.
      size_bytes: bytes that it occupies, of which `padding_bytes` hold nothing.
      allocation, offset_bytes: where it lies; offsets count within the allocation.
      start, end: first and last position of the schedule at which it is alive, both included.
      memory_space: "device", "host", or an on-chip memory of the target ("vmem", "smem", ...).
      depth: of nested loops round it.
    """

    name: str
    kind: str
    layer: str = ""
    phase: Phase = ""
    path: str = ""
    saved_name: str = ""
    op: str = ""
    op_name: str = ""
    source: str = ""
    source_file: str = ""
    function: str = ""
    shape: str = ""
    layout: str = ""
    size_bytes: int
    padding_bytes: int = 0
    allocation: int = 0
    offset_bytes: int = 0
    start: int = 0
    end: int = 0
    memory_space: str = "device"
    depth: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop:
    """A loop of the schedule: its body is positions `start` to `end`, both included, run `trips` times."""

    name: str
    start: int
    end: int
    trips: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment:
    """The live bytes from `position` of the schedule until the next moment.

    Args:
      position: index in the schedule; a loop's body counts once.
      by_kind: (kind, bytes) pairs that sum to the bytes alive.
      op, layer, source, shape: what runs there.
    """

    position: int
    by_kind: tuple[tuple[str, int], ...]
    op: str = ""
    layer: str = ""
    source: str = ""
    shape: str = ""

    @property
    def live_bytes(self) -> int:
        """Bytes alive at this moment."""
        return sum(size for _, size in self.by_kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline:
    """Live device bytes over the schedule.

    Args:
      length: number of positions in the schedule.
      peak_position: where most bytes are alive.
      moments: in order of position; only those where something changes.
      loops: the outer ones first.
      buffers: the largest buffers of the whole schedule, largest first, for a map of memory over time.
    """

    length: int
    peak_position: int
    moments: tuple[Moment, ...]
    loops: tuple[Loop, ...] = ()
    buffers: tuple[Buffer, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBytes:
    """Bytes at peak of one kind in one layer."""

    layer: str
    kind: str
    size_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DtypeBytes:
    """Bytes of the arguments of one kind that are kept in one dtype."""

    kind: str
    dtype: str
    size_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DonationMiss:
    """A donated argument that no output could reuse."""

    path: str
    size_bytes: int
    dtype_in: str
    dtype_out: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that costs bytes, and what to do about it.

    Args:
      kind: a short name, the same for all of one sort: "upcast", "padding", "donation_miss", ...
      size_bytes: bytes at stake; an estimate where `estimated`.
      title: one line.
      evidence: the buffers or leaves that it is seen in.
      cure: what to do.
    """

    kind: str
    size_bytes: int
    title: str
    evidence: tuple[str, ...] = ()
    cure: str
    estimated: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime:
    """An estimate of the time that one call takes; nothing was run.

    Args:
      seconds: of one call on one device.
      method: "compiler_cycles" (the TPU compiler's own estimate) or "roofline".
      filled_share: share of the seconds that a roofline fills in, where the compiler gives no cycles.
      compute_seconds, memory_seconds, collective_seconds: the seconds, by what bounds each operation.
      notes: sentences on what the estimate leaves out.
    """

    seconds: float
    method: Literal["compiler_cycles", "roofline"]
    filled_share: float
    compute_seconds: float
    memory_seconds: float
    collective_seconds: float = 0.0
    notes: tuple[str, ...] = ()
