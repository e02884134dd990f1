"""A buffer assignment worked out from the scheduled HLO alone, for where the compiler's own cannot be had."""

import dataclasses

from jaxmem.analysis.assignment._flow import Flow
from jaxmem.analysis.assignment._follow import follow
from jaxmem.analysis.assignment._heap import Block, move_into_outputs, pack, reuse
from jaxmem.analysis.assignment._records import Allocation, AllocationKind, Assignment, Value
from jaxmem.analysis.hlo._module import Module
from jaxmem.analysis.hlo._parse import parse_hlo
from jaxmem.analysis.hlo._types import arrays, leaves, padded_bytes

# Bytes: offsets in the dumps of these compilers are multiples.
_ALIGNMENT = {"cpu": 64, "gpu": 256, "tpu": 512}
_POINTER_BYTES = 8


def liveness(hlo: str | Module, *, platform: str = "") -> Assignment:
    """An estimate of the assignment; sizes and live ranges are as XLA's, the places are not.

    Args:
      hlo: `compiled.as_text()`, or parsed: scheduled (`is_scheduled=true`), so that the order of the lines is that of
        the program.
      platform: "cpu", "gpu" or "tpu", for the alignment of buffers and the names of memories.

    Returns:
      An `Assignment` of source "liveness". All temporaries of one memory space lie in one allocation, packed best-fit
      by decreasing size.

    Raises:
      ValueError: the text has no entry computation, or is not scheduled.
    """
    module = parse_hlo(hlo) if isinstance(hlo, str) else hlo
    if "is_scheduled=true" not in module.header:
        raise ValueError("wanted scheduled HLO (is_scheduled=true in its first line), as Compiled.as_text() gives it")
    return _assign(follow(module), module, platform)


def _assign(flow: Flow, module: Module, platform: str) -> Assignment:
    ranges = flow.live_ranges()
    members: dict[int, list[Value]] = {}
    for number, (name, index, text) in enumerate(zip(flow.names, flow.indices, flow.types, strict=True)):
        if number not in flow.replaced:
            value = Value(name, index, _size(text), 0, 0, text, _color(text), *ranges[name, index])
            members.setdefault(flow.buffer(number), []).append(value)
    parameters = {
        flow.buffer(number): (parameter, index)
        for parameter, held in flow.parameters.items()
        for index, number in held.items()
    }
    made = {buffer: module.instruction(values[0].name) for buffer, values in members.items()}
    constants = {buffer for buffer, instruction in made.items() if instruction and instruction.opcode == "constant"}
    outputs = {flow.buffer(number) for number in flow.outputs.values()} - parameters.keys() - constants
    blocks: dict[int, dict[int, Block]] = {}
    for buffer, values in members.items():
        if buffer not in parameters and buffer not in constants:
            block = Block(size_bytes=max(v.size_bytes for v in values), spans=sorted((v.start, v.end) for v in values))
            blocks.setdefault(values[0].color, {})[buffer] = block
    places: dict[int, tuple[int, int]] = {}  # per buffer, its allocation and its offset there
    heads: list[Allocation] = []
    for buffer, (parameter, index) in parameters.items():
        _add(heads, places, members, buffer, kind="parameter", parameter=parameter, shape_index=index)
    for buffer in constants - parameters.keys():
        _add(heads, places, members, buffer, kind="constant")
    for color, of_color in sorted(blocks.items()):
        homes = reuse(flow, module, of_color, outputs)
        moved = move_into_outputs(of_color, outputs)
        for buffer in outputs & of_color.keys():
            _add(heads, places, members, buffer, kind="output")
        temps = {buffer: block for buffer, block in of_color.items() if buffer not in outputs}
        size, offsets = pack(temps, _ALIGNMENT.get(platform, 64))
        places |= {buffer: (len(heads), offset) for buffer, offset in offsets.items()}
        heads.append(Allocation(number=len(heads), size_bytes=size, kind="temp", color=color))
        places |= {buffer: places[host] for buffer, host in moved.items()}
        places |= {buffer: places[home] for buffer, home in homes.items()}
    held: list[list[Value]] = [[] for _ in heads]
    for buffer, values in members.items():
        number, offset = places[buffer]
        held[number] += [v._replace(allocation=number, offset_bytes=offset) for v in values]
    live_out = {places[flow.buffer(number)][0] for number in flow.outputs.values()}
    allocations = tuple(
        dataclasses.replace(head, live_out=head.number in live_out, values=tuple(held[head.number])) for head in heads
    )
    return Assignment(allocations=allocations, schedule=tuple(flow.schedule), source="liveness", platform=platform)


def _add(
    heads: list[Allocation],
    places: dict[int, tuple[int, int]],
    members: dict[int, list[Value]],
    buffer: int,
    kind: AllocationKind,
    parameter: int | None = None,
    shape_index: tuple[int, ...] = (),
) -> None:
    """An allocation for one buffer."""
    number, values = len(heads), members[buffer]
    places[buffer] = (number, 0)
    head = Allocation(
        number=number,
        size_bytes=max(v.size_bytes for v in values),
        kind=kind,
        parameter=parameter,
        shape_index=shape_index,
        color=values[0].color,
    )
    heads.append(head)


def _size(type_text: str) -> int:
    """Bytes of a value; a tuple is a table of pointers."""
    if type_text.startswith("("):
        return _POINTER_BYTES * sum(len(index) == 1 for index, _ in leaves(type_text))
    return padded_bytes(type_text)


def _color(type_text: str) -> int:
    found = arrays(type_text) if not type_text.startswith("(") else []
    return found[0].memory_space if found else 0
