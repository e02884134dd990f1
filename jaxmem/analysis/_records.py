"""The records that a report is made of: buffers, layers, the timeline, findings."""

import dataclasses
from typing import Literal

from jaxmem._display import column, record
from jaxmem._shown import Brief

KINDS = (
    "parameters",
    "parameter_copies",
    "optimizer_state",
    "gradients",
    "accumulators",
    "activations",
    "state",
    "batch",
    "arguments",
    "argument_copies",
    "outputs",
    "collectives",
    "constants",
    "workspace",
    "code",
    "fragmentation",
    "unattributed",
)
"""The kinds that bytes are counted under.

`arguments` are those of a plain function whose kinds are not declared. Copies are temporaries: `parameter_copies`
are slices, relayouts and casts of parameters that live within the step only, `argument_copies` those of optimizer
state, batch and other arguments. `fragmentation` lies unused between the buffers of the temporary allocation at its
peak.
"""

Phase = Literal["forward", "backward", "recompute", "update", ""]


@record
class Buffer(Brief, identity=("name", "kind", "size_bytes", "shape", "op", "layer", "source")):
    """One buffer of the compiled program, and where it comes from. Texts are empty where nothing is known."""

    # fmt: off
    name: str = column("The value in the optimised HLO, `fusion.12{0}`.", detail="compiler's name")
    kind: str = column("One of `KINDS`.", buffer_row="kind")
    layer: str = column(
        'Path of the module, or of the scan, that computes it: "GPT/blocks/mlp_in"; empty outside any.',
        default="", buffer_row="layer")
    phase: Phase = column(
        '"forward", "backward", "recompute" or "update" (optimizer).', default="", buffer_row="phase")
    path: str = column(
        "Path of the argument or output that it holds: \"state.params['embed']['embedding']\".",
        default="", detail="argument")
    saved_name: str = column("The `checkpoint_name` under which it is saved.", default="", detail="saved name")
    op: str = column(
        'The operation that computes it, in JAX\'s words: "dot_general"; of an argument "parameter".',
        default="", buffer_row="op")
    op_name: str = column("JAX's whole scope path of that operation.", default="", detail="scope")
    source: str = column('The user\'s line: "gpt.py:51".', default="", buffer_row="source", after="shape")
    source_file: str = column("Whole path of that file.", default="", detail="file")
    function: str = column("The function at that line.", default="", detail="function")
    shape: str = column('"f32[8,1024,768]".', default="", buffer_row="shape")
    layout: str = column(
        "Layout as the compiler writes it, tiles included.", default="", detail="layout", after="op_name")
    size_bytes: int = column("Bytes that it occupies.", "buffer_provenance", buffer_row="bytes", rank=1)
    padding_bytes: int = column(
        "Of these, bytes that hold nothing.", "buffer_provenance", default=0, buffer_row="padding", rank=2)
    allocation: int = column("Number of the allocation that it lies in.", default=0)
    offset_bytes: int = column("Offset within the allocation.", "buffer_provenance", default=0)
    start: int = column(
        "First position of the schedule at which it is alive, included.", default=0, buffer_row="alive")
    end: int = column("Last position of the schedule at which it is alive, included.", default=0)
    memory_space: str = column(
        '"device", "host", or an on-chip memory of the target ("vmem", "smem", ...).',
        default="device", detail="memory")
    depth: int = column("Of nested loops round it.", default=0)
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class Loop(Brief):
    """A loop of the schedule: its body is positions `start` to `end`, both included, run `trips` times."""

    name: str
    start: int
    end: int
    trips: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stretch(Brief):
    """Positions `start` to `end` of the schedule, both included, in which one phase of the step runs.

    What has no phase, such as a copy, counts to the stretch that it stands in.
    """

    phase: Phase
    start: int
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Moment(Brief):
    """The live bytes from `position` of the schedule until the next moment.

    Args:
      position: index in the schedule; a loop's body counts once.
      by_kind: (kind, bytes) pairs that sum to the bytes alive.
      op, layer, source, shape, phase: what runs there, as of a `Buffer`.
    """

    position: int
    by_kind: tuple[tuple[str, int], ...]
    op: str = ""
    layer: str = ""
    source: str = ""
    shape: str = ""
    phase: Phase = ""

    @property
    def live_bytes(self) -> int:
        """Bytes alive at this moment."""
        return sum(size for _, size in self.by_kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timeline(Brief, identity=("length", "peak_position", "moments", "buffers")):
    """Live device bytes over the schedule.

    Args:
      length: number of positions in the schedule.
      peak_position: where most bytes are alive.
      moments: in order of position; only those where something changes.
      loops: the outer ones first.
      phases: stretches of forward pass, backward pass, update, in order of position.
      buffers: the largest buffers of the whole schedule, largest first, for a map of memory over time.
    """

    length: int
    peak_position: int
    moments: tuple[Moment, ...]
    loops: tuple[Loop, ...] = ()
    phases: tuple[Stretch, ...] = ()
    buffers: tuple[Buffer, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceLine(Brief):
    """The text of a line of the user's code, as it was when the report was made.

    Args:
      file: whole path, the `source_file` of a buffer.
      line: number of the line.
      text: without the white space round it; cut where it is long.
    """

    file: str
    line: int
    text: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting(Brief):
    """Something that the program was made with, and that a diff may tell of: its name and its value in words."""

    name: str
    value: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerBytes(Brief):
    """Bytes at peak of one kind in one layer."""

    layer: str
    kind: str
    size_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DtypeBytes(Brief):
    """Bytes of the arguments of one kind that are kept in one dtype."""

    kind: str
    dtype: str
    size_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DonationMiss(Brief):
    """A donated argument that no output could reuse."""

    path: str
    size_bytes: int
    dtype_in: str
    dtype_out: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriedCure(Brief, identity=("name", "helps", "text")):
    """What a cure of a finding came to when it was compiled.

    Args:
      name: what it changes in the config, "order=tied".
      helps: whether it saves bytes; or time, or time to compile, at no cost in bytes.
      text: what it gives, in words: "−2.1 GiB, −28 % time, compile × 0.5"; for one that JAX or a compiler refuses, why.
      peak_bytes, step_seconds: of the step with it; None where it was refused.
    """

    name: str
    helps: bool
    text: str
    peak_bytes: int | None = None
    step_seconds: float | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding(Brief, identity=("kind", "size_bytes", "title")):
    """Something that costs bytes, and what to do about it.

    Args:
      kind: a short name, the same for all of one sort: "upcast", "padding", "donation_miss", ...
      size_bytes: bytes at stake; an estimate where `estimated`.
      title: one line.
      evidence: the buffers or leaves that it is seen in.
      cure: what to do, in Python.
      shell: the same round a command line, in which FILE stands for the user's file and its options; empty where
        `cure` is for both.
      configs: the `MemoryConfig`s that the cure names, as JSON, each with what the step has beside it.
      tried: what those of them that were compiled came to.
    """

    kind: str
    size_bytes: int
    title: str
    evidence: tuple[str, ...] = ()
    cure: str
    shell: str = ""
    configs: tuple[str, ...] = ()
    tried: tuple[TriedCure, ...] = ()
    estimated: bool = False

    @property
    def proof(self) -> str:
        """Whether the cure was compiled, and what it came to; empty where it names no config.

        >>> cure = Finding(kind="float32", size_bytes=8, title="", cure="", configs=("{}",))
        >>> cure.proof
        'Not compiled: --cures, or try_cures, compiles it.'
        >>> tried = TriedCure(name="precision=bfloat16", helps=True, text="−2.0 GiB, −28 % time")
        >>> dataclasses.replace(cure, tried=(tried,)).proof
        'Compiled: precision=bfloat16 −2.0 GiB, −28 % time.'
        """
        if not self.configs:
            return ""
        if not self.tried:
            return "Not compiled: --cures, or try_cures, compiles it."
        good = [f"{each.name} {each.text}" for each in self.tried if each.helps]
        bad = [f"{each.name} {each.text}" for each in self.tried if not each.helps]
        parts = [f"{what}: {'; '.join(names)}." for what, names in (("Compiled", good), ("No help", bad)) if names]
        parts += ["The others are not compiled."] if len({*self.configs}) > len(self.tried) else []
        return " ".join(parts)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepTime(Brief):
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
