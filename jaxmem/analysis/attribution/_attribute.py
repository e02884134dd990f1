"""Puts it together: each buffer's origin, layer, kind and source line; the peak; the timeline."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from jaxmem.analysis._kind_paths import undeclared_kind
from jaxmem.analysis._records import KINDS, Buffer, LayerBytes, Loop, Moment, Phase, SourceLine, Stretch, Timeline
from jaxmem.analysis.assignment import Assignment, Span, Sweep, sweep
from jaxmem.analysis.attribution._buffers import Buffers, rooted
from jaxmem.analysis.attribution._kinds import program_arguments
from jaxmem.analysis.attribution._origin import Origin
from jaxmem.analysis.attribution._scopes import NO_SCOPE, parse_scope
from jaxmem.analysis.hlo._loops import trip_count
from jaxmem.analysis.hlo._module import Module

# Where buffers overlap, the bytes count under the first of these.
_PRIORITY = sorted(KINDS, key=lambda kind: (kind == "unattributed", kind == "activations", KINDS.index(kind)))
_MAP_BUFFERS = 4000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attribution:
    """Every byte of device memory at the peak, and the way there.

    Args:
      by_kind: (kind, bytes) pairs, largest first; they sum to `total_bytes`.
      by_layer: bytes at the peak by layer and kind, largest first.
      buffers: those alive at the peak, largest first.
      timeline: live bytes over the schedule.
      padding_bytes: of the buffers at the peak.
      origins: by the names of buffers, where each value comes from.
      source_lines: what stands at the lines of the user's code that buffers and timeline name.
      total_bytes: arguments, outputs that are not aliased, and the temporary allocations.
    """

    by_kind: tuple[tuple[str, int], ...]
    by_layer: tuple[LayerBytes, ...]
    buffers: tuple[Buffer, ...]
    timeline: Timeline
    padding_bytes: int
    origins: Mapping[str, Origin]
    source_lines: tuple[SourceLine, ...]
    total_bytes: int


def attribute(
    assignment: Assignment,
    module: Module,
    text: str,
    kind_of: Callable[[str], str] | None = None,
    *,
    saved_names: Mapping[tuple[str, int], str] | None = None,
) -> Attribution:
    """Attributes the buffers of a compiled program.

    Args:
      assignment: where the compiler put its buffers.
      module: the optimised, scheduled HLO, and `text` what it was read from.
      kind_of: kind of an argument, from its path; "arguments" for all where it is not given.
      saved_names: names of saved values by source line ("/path/gpt.py:59") and number of elements.
    """
    arguments = program_arguments(module, kind_of or undeclared_kind)
    made = Buffers(module, text, arguments, saved_names or {}, assignment.schedule)
    resident, temporary = [], []
    for allocation in assignment.allocations:
        if assignment.memory_space(allocation.color) != "device":
            continue
        if allocation.kind == "temp":
            temporary += [made.temporary(value) for value in allocation.values]
        elif allocation.kind in ("parameter", "output"):
            resident.append(made.resident(allocation, len(assignment.schedule)))
    swept = _sweep(temporary, assignment)
    at_peak = int(swept.positions[swept.peak])
    chosen = [*resident, *_at(temporary, at_peak)]
    constant: dict[str, int] = {}
    for buffer in resident:
        constant[buffer.kind] = constant.get(buffer.kind, 0) + buffer.size_bytes
    by_kind = _totals(constant, swept, swept.peak)
    hole = assignment.temp_bytes - swept.peak_bytes
    if hole > 0:
        by_kind["fragmentation"] = hole
    chosen = tuple(sorted(rooted(chosen), key=lambda b: (-b.size_bytes, b.name)))
    return Attribution(
        by_kind=tuple(sorted(by_kind.items(), key=lambda item: -item[1])),
        by_layer=_layers(chosen),
        buffers=chosen,
        timeline=Timeline(
            length=len(assignment.schedule),
            peak_position=at_peak,
            moments=_moments(constant, swept, assignment, made),
            loops=_loops(assignment, module),
            phases=_phases(assignment.schedule, module),
            buffers=tuple(sorted(rooted(temporary), key=lambda b: (-b.size_bytes, b.name))[:_MAP_BUFFERS]),
        ),
        padding_bytes=sum(b.padding_bytes for b in chosen),
        origins=made.origins,
        source_lines=made.frames.lines(),
        total_bytes=sum(by_kind.values()),
    )


def _sweep(buffers: list[Buffer], assignment: Assignment) -> Sweep:
    rank, bases = {kind: number for number, kind in enumerate(_PRIORITY)}, assignment.bases
    spans = [Span(bases[b.allocation] + b.offset_bytes, b.size_bytes, b.start, b.end, rank[b.kind]) for b in buffers]
    return sweep(spans, len(_PRIORITY))


def _totals(constant: dict[str, int], swept: Sweep, row: int) -> dict[str, int]:
    totals = dict(constant)
    for kind, size in zip(_PRIORITY, swept.bytes_by_kind[row].tolist(), strict=True):
        if size:
            totals[kind] = totals.get(kind, 0) + size
    return totals


def _at(buffers: list[Buffer], position: int) -> list[Buffer]:
    """The buffers alive at a position, without those whose bytes others already stand for."""
    alive = [b for b in buffers if b.start <= position <= b.end and b.size_bytes]
    alive.sort(key=lambda b: (-b.size_bytes, b.kind == "unattributed", -b.start, b.name))
    kept: list[Buffer] = []
    for allocation in {b.allocation for b in alive}:
        here = [b for b in alive if b.allocation == allocation]
        edges = np.unique([edge for b in here for edge in (b.offset_bytes, b.offset_bytes + b.size_bytes)])
        taken = np.zeros(len(edges), bool)
        first = np.searchsorted(edges, [b.offset_bytes for b in here])
        last = np.searchsorted(edges, [b.offset_bytes + b.size_bytes for b in here])
        for buffer, low, high in zip(here, first, last, strict=True):
            if not taken[low:high].all():
                taken[low:high] = True
                kept.append(buffer)
    return kept


def _layers(buffers) -> tuple[LayerBytes, ...]:
    totals: dict[tuple[str, str], int] = {}
    for buffer in buffers:
        totals[buffer.layer, buffer.kind] = totals.get((buffer.layer, buffer.kind), 0) + buffer.size_bytes
    rows = [LayerBytes(layer=layer, kind=kind, size_bytes=size) for (layer, kind), size in totals.items()]
    return tuple(sorted(rows, key=lambda row: (-row.size_bytes, row.layer, row.kind)))


def _moments(constant: dict[str, int], swept: Sweep, assignment: Assignment, buffers: Buffers) -> tuple[Moment, ...]:
    moments = []
    if swept.positions[0] > 0:  # before the first temporary there is what the program is given
        moments.append(Moment(position=0, by_kind=tuple(constant.items())))
    for row, position in enumerate(swept.positions.tolist()):
        name = assignment.schedule[position] if position < len(assignment.schedule) else ""
        instruction = buffers.module.instruction(name)
        scope = parse_scope(instruction.op_name) if instruction else NO_SCOPE
        moments.append(
            Moment(
                position=position,
                by_kind=tuple(_totals(constant, swept, row).items()),
                op=scope.op or (instruction.opcode if instruction else ""),
                layer=scope.layer,
                source=str(buffers.frames.of(instruction.rest)) if instruction else "",
                phase=scope.phase,
                shape=instruction.type.split("{")[0] if instruction and not instruction.type.startswith("(") else "",
            )
        )
    return tuple(moments)


def _phases(schedule: Sequence[str], module: Module) -> tuple[Stretch, ...]:
    """Runs of instructions of one phase."""
    starts: list[tuple[Phase, int]] = []
    for position, name in enumerate(schedule):
        instruction = module.instruction(name)
        phase = parse_scope(instruction.op_name).phase if instruction else ""
        if phase and (not starts or starts[-1][0] != phase):
            starts.append((phase, position if starts else 0))
    after = [*starts[1:], ("", len(schedule))]
    return tuple(Stretch(phase=p, start=s, end=e - 1) for (p, s), (_, e) in zip(starts, after, strict=False))


def _loops(assignment: Assignment, module: Module) -> tuple[Loop, ...]:
    """Each `while` of the schedule with the positions of its body, which stand right before it."""
    positions = {name: number for number, name in enumerate(assignment.schedule)}
    loops = []
    for name in assignment.schedule:
        loop = module.instruction(name)
        if loop is None or loop.opcode != "while":
            continue
        body = module.callee(loop, "body")
        inside = [positions[n] for n in _all_of(module, body) if n in positions] if body else []
        if inside:
            trips = trip_count(module, module.computation_of[name], loop)
            loops.append(Loop(name=name, start=min(inside), end=max(inside), trips=trips))
    return tuple(sorted(loops, key=lambda loop: (loop.start, -loop.end)))


def _all_of(module: Module, computation) -> list[str]:
    names = []
    for instruction in computation.instructions.values():
        names.append(instruction.name)
        if instruction.opcode == "while" and (inner := module.callee(instruction, "body")):
            names += _all_of(module, inner)
    return names
