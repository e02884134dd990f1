"""A buffer assignment worked out from the scheduled HLO alone, for where the compiler's own cannot be had."""

import re

from jaxmem.analysis._hlo import Module, parse_hlo
from jaxmem.analysis.assignment._flow import Flow
from jaxmem.analysis.assignment._follow import follow
from jaxmem.analysis.assignment._heap import Block, pack
from jaxmem.analysis.assignment._ranges import live_ranges
from jaxmem.analysis.assignment._records import Allocation, Assignment, Value
from jaxmem.analysis.assignment._reuse import reuse
from jaxmem.analysis.assignment._types import leaves, padded_bytes

_ALIGNMENT = {"cpu": 64, "gpu": 256, "tpu": 512}
_POINTER_BYTES = 8
_SPACE = re.compile(r"S\((\d+)\)")


def liveness(hlo_text: str, *, module: Module | None = None, platform: str = "") -> Assignment:
    """An estimate of the assignment; sizes and live ranges are as XLA's, the places are not.

    Args:
      hlo_text: `compiled.as_text()`: scheduled (`is_scheduled=true`), so that the order of the lines is that of the
        program.
      module: `parse_hlo(hlo_text)`, where it is there already.
      platform: "cpu", "gpu" or "tpu", for the alignment of buffers; where empty, tiled layouts tell a TPU.

    Returns:
      An `Assignment` of source "liveness". All temporaries of one memory space lie in one allocation, packed best-fit
      by decreasing size.

    Raises:
      ValueError: the text has no entry computation, or is not scheduled.
    """
    header = hlo_text.partition("\n")[0]
    if "is_scheduled=true" not in header:
        raise ValueError("wanted scheduled HLO (is_scheduled=true in its first line), as Compiled.as_text() gives it")
    platform = platform or ("tpu" if ":T(" in hlo_text else "")
    module = module or parse_hlo(hlo_text)
    flow = follow(module, header)
    return _assign(flow, module, platform)


def _assign(flow: Flow, module: Module, platform: str) -> Assignment:
    instructions = {i.name: i for c in module.computations.values() for i in c.instructions.values()}
    ranges = live_ranges(flow)
    buffers: dict[int, list[int]] = {}
    for number in range(len(flow.names)):
        if number not in flow.replaced:
            buffers.setdefault(flow.buffer(number), []).append(number)
    parameters = {
        flow.buffer(number): (parameter, index)
        for parameter, held in flow.parameters.items()
        for index, number in held.items()
    }
    outputs = {flow.buffer(number) for number in flow.outputs.values()}
    constants = {flow.buffer(n) for n in range(len(flow.names)) if instructions[flow.names[n]].opcode == "constant"}

    def values(members: list[int], allocation: int, offset: int) -> list[Value]:
        found = []
        for n in members:
            start, end = ranges[flow.names[n], flow.indices[n]]
            size, color = _size(flow.types[n], platform), _color(flow.types[n])
            found.append(
                Value(flow.names[n], flow.indices[n], size, allocation, offset, flow.types[n], color, start, end)
            )
        return found

    allocations: list[Allocation] = []
    blocks: dict[int, dict[int, Block]] = {}
    for buffer, members in buffers.items():
        size = max(_size(flow.types[n], platform) for n in members)
        color = _color(flow.types[members[0]])
        kept = buffer in parameters or buffer in outputs or buffer in constants
        if not kept:
            spans = sorted(ranges[flow.names[n], flow.indices[n]] for n in members)
            blocks.setdefault(color, {})[buffer] = Block(size_bytes=size, spans=spans)
            continue
        number = len(allocations)
        parameter, index = parameters.get(buffer, (None, ()))
        kind = "parameter" if parameter is not None else "constant" if buffer in constants else "output"
        allocations.append(
            Allocation(
                number=number,
                size_bytes=size,
                kind=kind,
                parameter=parameter,
                shape_index=index,
                live_out=buffer in outputs,
                color=color,
                values=tuple(values(members, number, 0)),
            )
        )
    for color, of_color in sorted(blocks.items()):
        shared = reuse(flow, module, instructions, of_color)
        total, offsets = pack(of_color, _ALIGNMENT.get(platform, 64))
        number, held = len(allocations), []
        for buffer, members in buffers.items():
            home = shared.get(buffer, buffer)
            if home in offsets:
                held += values(members, number, offsets[home])
        allocations.append(Allocation(number=number, size_bytes=total, kind="temp", color=color, values=tuple(held)))
    return Assignment(
        allocations=tuple(allocations), schedule=tuple(flow.schedule), source="liveness", platform=platform
    )


def _size(type_text: str, platform: str) -> int:
    """Bytes of a value; a tuple is a table of pointers."""
    if type_text.startswith("("):
        return _POINTER_BYTES * sum(len(index) == 1 for index, _ in leaves(type_text))
    return padded_bytes(type_text)


def _color(type_text: str) -> int:
    found = _SPACE.search(type_text) if not type_text.startswith("(") else None
    return int(found.group(1)) if found else 0
