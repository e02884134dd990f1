"""Puts it together: each buffer's origin, layer, kind and source line; the peak; the timeline."""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from jaxmem._scopes import ACCUMULATE_SCOPE
from jaxmem.analysis._kind_paths import undeclared_kind
from jaxmem.analysis._records import KINDS, Buffer, DonationMiss, Finding, LayerBytes, Loop, Moment, Timeline
from jaxmem.analysis.assignment import Allocation, Assignment, Value, logical_bytes, padded_bytes
from jaxmem.analysis.attribution._frames import Frame, Frames
from jaxmem.analysis.attribution._graph import Graph
from jaxmem.analysis.attribution._kinds import Argument, Kinds, program_arguments
from jaxmem.analysis.attribution._origin import Origin, origin
from jaxmem.analysis.attribution._scopes import Scope, parse_scope
from jaxmem.analysis.attribution._timeline import Span, Sweep, sweep
from jaxmem.analysis.findings import findings
from jaxmem.analysis.hlo._loops import trip_count
from jaxmem.analysis.hlo._parse import Module, parse_shape

# Where buffers overlap, the bytes count under the first of these.
_PRIORITY = sorted(KINDS, key=lambda kind: (kind == "unattributed", kind == "activations", KINDS.index(kind)))
_MAP_BUFFERS = 400
_KEY = re.compile(r"\['([^']+)'\]|\.(\w+)|\[(\w+)\]")
_NO_SCOPE = Scope("", "", "")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attribution:
    """Every byte of device memory at the peak, and the way there.

    Args:
      by_kind: (kind, bytes) pairs, largest first; they sum to `total_bytes`.
      by_layer: bytes at the peak by layer and kind, largest first.
      buffers: those alive at the peak, largest first.
      timeline: live bytes over the schedule.
      padding_bytes: of the buffers at the peak.
      findings: what costs bytes without need, largest first.
      total_bytes: arguments, outputs that are not aliased, and the temporary allocations.
    """

    by_kind: tuple[tuple[str, int], ...]
    by_layer: tuple[LayerBytes, ...]
    buffers: tuple[Buffer, ...]
    timeline: Timeline
    padding_bytes: int
    findings: tuple[Finding, ...]
    total_bytes: int


def attribute(
    assignment: Assignment,
    module: Module,
    text: str,
    kind_of: Callable[[str], str] | None = None,
    *,
    saved_names: Mapping[tuple[str, int], str] | None = None,
    donation_misses: Iterable[DonationMiss] = (),
    backend: str = "",
) -> Attribution:
    """Attributes the buffers of a compiled program.

    Args:
      assignment: where the compiler put its buffers.
      module: the optimised, scheduled HLO, and `text` what it was read from.
      kind_of: kind of an argument, from its path; "arguments" for all where it is not given.
      saved_names: names of saved values by source line ("/path/gpt.py:59") and number of elements.
      donation_misses: for the findings.
      backend: platform compiled for.
    """
    arguments = program_arguments(module, kind_of or undeclared_kind)
    namer = _Namer(module, text, arguments, saved_names or {}, assignment.schedule)
    resident, temporary = [], []
    for allocation in assignment.allocations:
        if assignment.memory_space(allocation.color) != "device":
            continue
        if allocation.kind == "temp":
            temporary += [namer.temporary(value) for value in allocation.values]
        elif allocation.kind in ("parameter", "output"):
            resident.append(namer.resident(allocation, len(assignment.schedule)))
    swept = _sweep(temporary, assignment)
    at_peak = int(swept.positions[swept.peak])
    chosen = [*resident, *_at(temporary, at_peak)]
    constant: dict[str, int] = {}
    for buffer in resident:
        constant[buffer.kind] = constant.get(buffer.kind, 0) + buffer.size_bytes
    by_kind = _totals(constant, swept, swept.peak)
    hole = assignment.temp_bytes - int(swept.bytes_by_kind[swept.peak].sum())
    if hole > 0:
        by_kind["fragmentation"] = hole
    chosen = tuple(sorted(_rooted(chosen), key=lambda b: (-b.size_bytes, b.name)))
    return Attribution(
        by_kind=tuple(sorted(by_kind.items(), key=lambda item: -item[1])),
        by_layer=_layers(chosen),
        buffers=chosen,
        timeline=Timeline(
            length=len(assignment.schedule),
            peak_position=at_peak,
            moments=_moments(constant, swept, assignment, namer),
            loops=_loops(assignment, namer.graph),
            buffers=tuple(sorted(_rooted(temporary), key=lambda b: (-b.size_bytes, b.name))[:_MAP_BUFFERS]),
        ),
        padding_bytes=sum(b.padding_bytes for b in chosen),
        findings=findings(chosen, namer.origins, namer.graph, donation_misses, backend, assignment.schedule),
        total_bytes=sum(by_kind.values()),
    )


class _Namer:
    """Makes a `Buffer` of what the compiler assigned."""

    def __init__(
        self,
        module: Module,
        text: str,
        arguments: dict[int, Argument],
        names: Mapping[tuple[str, int], str],
        schedule: Sequence[str],
    ):
        self.names, self.schedule = names, schedule
        self.graph, self.frames = Graph(module), Frames(text)
        self.arguments, self.kinds = arguments, Kinds(arguments, self.graph)
        self.origins: dict[str, Origin] = {}  # by the buffer's name

    def temporary(self, value: Value) -> Buffer:
        if value.layout.startswith("("):
            return self._pointers(value)
        own = self.graph.instruction(value.name)
        if own is not None:
            found = origin(self.graph, value.name, value.index)
        else:  # made inside an asynchronous computation, which the text shows as its start only
            start = self.schedule[value.start] if 0 <= value.start < len(self.schedule) else ""
            own = self.graph.instruction(start)
            found = origin(self.graph, start, (1, *value.index))
        if found:
            self.origins[_value_name(value)] = found
        scope = parse_scope(found.instruction.op_name) if found else None
        kind = self.kinds.of(own, found, scope, value.layout)
        said = scope if scope and found and found.instruction.opcode != "parameter" else _NO_SCOPE
        path = ""
        if found and found.instruction.opcode == "parameter":
            path = found.instruction.argument_path
        elif kind in ("gradients", "accumulators"):
            path = self.kinds.parameter_path(parse_shape(value.layout), said.layer)
        frame = self.frames.of(found.instruction.rest) if found else None
        if found and said.op and (not said.layer or kind == "accumulators"):
            said = said._replace(layer=self._layer(found, kind, frame) or said.layer)
            if kind == "accumulators":
                path = self.kinds.parameter_path(parse_shape(value.layout), said.layer)
        return Buffer(
            name=_value_name(value),
            kind=kind,
            layer=said.layer,
            phase=said.phase,
            path=path,
            saved_name=self.names.get((f"{frame.file}:{frame.line}", math.prod(parse_shape(value.layout))), "")
            if frame and kind == "activations" and said.phase == "forward"
            else "",
            op=said.op or (f"copy of {found.instruction.opcode}" if found else ""),
            op_name=found.instruction.op_name if found else (own.op_name if own else ""),
            source=str(frame or ""),
            source_file=frame.file if frame else "",
            function=frame.function if frame else "",
            shape=value.layout.split("{")[0],
            layout=value.layout,
            size_bytes=value.size_bytes,
            padding_bytes=_padding(value.layout),
            allocation=value.allocation,
            offset_bytes=value.offset_bytes,
            start=value.start,
            end=value.end,
        )

    def _layer(self, found: Origin, kind: str, frame: Frame | None) -> str:
        """Of what no named scope tells: an accumulator's is its gradient's; else the user's classes, or the scan."""
        instruction = found.instruction
        if kind == "accumulators":
            for number in range(len(self.graph.operands(instruction))):
                added = self.graph.operand(instruction, number)
                made = origin(self.graph, added.name) if added else None
                scope = parse_scope(made.instruction.op_name) if made else _NO_SCOPE
                if made is None or ACCUMULATE_SCOPE in made.instruction.op_name:
                    continue  # the accumulator itself
                if scope.phase == "backward":
                    return scope.layer or self.frames.modules(made.instruction.rest)
            return ""
        layer = self.frames.modules(instruction.rest)
        if not layer and "/while/body/" in instruction.op_name:
            layer = f"scan({frame.function.rpartition('.')[2]})" if frame and frame.function else "scan"
        return layer

    def _pointers(self, value: Value) -> Buffer:
        """The table of addresses that a tuple is."""
        return Buffer(
            name=_value_name(value),
            kind="workspace",
            op="tuple",
            shape="tuple",
            layout=value.layout,
            size_bytes=value.size_bytes,
            allocation=value.allocation,
            offset_bytes=value.offset_bytes,
            start=value.start,
            end=value.end,
        )

    def resident(self, allocation: Allocation, length: int) -> Buffer:
        """An argument or an output: alive from the first position to the last."""
        argument = self.arguments.get(allocation.parameter) if allocation.parameter is not None else None
        value = max(allocation.values, key=lambda v: v.size_bytes, default=None)
        layout = argument.type if argument else (value.layout if value else "")
        shape = "tuple" if layout.startswith("(") else layout.split("{")[0]
        return Buffer(
            name=_value_name(value) if value else f"allocation {allocation.number}",
            kind=argument.kind if argument else "outputs",
            layer="",
            path=argument.path if argument else "",
            op="parameter" if argument else "output",
            shape=shape,
            layout=layout,
            size_bytes=allocation.size_bytes,
            padding_bytes=_padding(layout),
            allocation=allocation.number,
            start=0,
            end=max(0, length - 1),
        )


def _padding(layout: str) -> int:
    """Bytes of an array that its tiles add."""
    return max(0, padded_bytes(layout) - logical_bytes(layout))


def _value_name(value: Value) -> str:
    return f"{value.name}{{{','.join(map(str, value.index))}}}" if value.index else value.name


def _sweep(buffers: list[Buffer], assignment: Assignment) -> Sweep:
    """Temporary allocations lie one behind the other."""
    bases, base = {}, 0
    for allocation in assignment.allocations:
        bases[allocation.number] = base
        base += allocation.size_bytes
    rank = {kind: number for number, kind in enumerate(_PRIORITY)}
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


def _rooted(buffers: list[Buffer]) -> list[Buffer]:
    """Layers under one root: arguments get theirs from their path, below the module that most layers share.

    The compiler loses that module's name here and there.
    """
    keys = {key for b in buffers if b.path for key in _keys(b.path)[:1]}
    sizes: dict[str, int] = {}
    for buffer in buffers:
        first = buffer.layer.split("/")[0]
        if first and first not in keys:
            sizes[first] = sizes.get(first, 0) + buffer.size_bytes
    root = max(sizes, key=sizes.__getitem__, default="")
    named = []
    for buffer in buffers:
        names = buffer.layer.split("/") if buffer.layer else []
        if not names and buffer.path and buffer.kind in ("parameters", "optimizer_state", "state"):
            names = _keys(buffer.path)[:-1]
        if root and names and names[0] in keys:
            names = [root, *names]
        named.append(dataclasses.replace(buffer, layer="/".join(names)) if names else buffer)
    return named


def _keys(path: str) -> list[str]:
    """The dictionary keys of a path: those of modules, not of the records that hold them.

    >>> _keys("state.opt_state[1][0].mu['blocks']['mlp_in']['kernel']")
    ['blocks', 'mlp_in', 'kernel']
    """
    return [key for key, _, _ in _KEY.findall(path) if key]


def _layers(buffers) -> tuple[LayerBytes, ...]:
    totals: dict[tuple[str, str], int] = {}
    for buffer in buffers:
        totals[buffer.layer, buffer.kind] = totals.get((buffer.layer, buffer.kind), 0) + buffer.size_bytes
    rows = [LayerBytes(layer=layer, kind=kind, size_bytes=size) for (layer, kind), size in totals.items()]
    return tuple(sorted(rows, key=lambda row: (-row.size_bytes, row.layer, row.kind)))


def _moments(constant: dict[str, int], swept: Sweep, assignment: Assignment, namer: _Namer) -> tuple[Moment, ...]:
    moments = []
    for row, position in enumerate(swept.positions.tolist()):
        name = assignment.schedule[position] if position < len(assignment.schedule) else ""
        instruction = namer.graph.instruction(name)
        scope = parse_scope(instruction.op_name) if instruction else _NO_SCOPE
        moments.append(
            Moment(
                position=position,
                by_kind=tuple(_totals(constant, swept, row).items()),
                op=scope.op or (instruction.opcode if instruction else ""),
                layer=scope.layer,
                source=str(namer.frames.of(instruction.rest)) if instruction else "",
                shape=instruction.type.split("{")[0] if instruction and not instruction.type.startswith("(") else "",
            )
        )
    return tuple(moments)


def _loops(assignment: Assignment, graph: Graph) -> tuple[Loop, ...]:
    """Each `while` of the schedule with the positions of its body, which stand right before it."""
    positions = {name: number for number, name in enumerate(assignment.schedule)}
    loops = []
    for name in assignment.schedule:
        loop = graph.instruction(name)
        if loop is None or loop.opcode != "while":
            continue
        body = graph.callee(loop, "body")
        inside = [positions[n] for n in _all_of(graph, body) if n in positions] if body else []
        if inside:
            trips = trip_count(graph.module, graph.computation_of[name], loop)
            loops.append(Loop(name=name, start=min(inside), end=max(inside), trips=trips))
    return tuple(sorted(loops, key=lambda loop: (loop.start, -loop.end)))


def _all_of(graph: Graph, computation) -> list[str]:
    names = []
    for instruction in computation.instructions.values():
        names.append(instruction.name)
        if instruction.opcode == "while" and (inner := graph.callee(instruction, "body")):
            names += _all_of(graph, inner)
    return names
