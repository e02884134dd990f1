"""Reads the two text files that XLA dumps: `*-buffer-assignment.txt` and `*-live-range.txt`.

One form holds for CPU, GPU and TPU of JAX 0.10 and 0.12; a TPU's adds `color` and `page`.
"""

import re

from jaxmem.analysis.assignment._records import Allocation, AllocationKind, Assignment, Value
from jaxmem.analysis.hlo._module import Index, parse_index

_ALLOCATION = re.compile(r"^allocation (\d+): size (\d+)(.*?):?$")
_VALUE = re.compile(r"^ value: <\d+ (\S+?)(?:\{([\d,]*)\})?(?: \(phi\))? @(\d+)> \(size=(\d+),offset=(\d+)\): (.*)$")
_PARAMETER = re.compile(r", parameter (\d+), shape \|.*\| at ShapeIndex \{([\d,]*)\}")
_COLOR = re.compile(r", color (\d+)")
_POSITION = re.compile(r"^    (\d+):(\S+)$")
_RANGE = re.compile(r"^    (\S+?)\{([\d,]*)\}:(\d+)-(\d+)$")


def read_text(buffer_assignment_text: str, live_range_text: str, *, platform: str = "") -> Assignment:
    """The assignment in the two files of one module; lines it does not know are passed over.

    Args:
      buffer_assignment_text: of `*after_optimizations-buffer-assignment.txt`.
      live_range_text: of `*after_optimizations-live-range.txt`.
      platform: "cpu", "gpu" or "tpu"; where empty, tiled layouts tell a TPU.

    >>> buffers = "BufferAssignment:\\nallocation 0: size 4, preallocated-temp:\\n"
    >>> buffers += " value: <7 add.1 @0> (size=4,offset=0): f32[]\\n"
    >>> ranges = "  InstructionSequence:\\n    0:add.1\\n  BufferLiveRange:\\n    add.1{}:0-1\\n"
    >>> read_text(buffers, ranges).temp_sweep.peak_bytes
    4
    """
    schedule, ranges = _read_ranges(live_range_text)
    blocks: list[tuple[re.Match, list[Value]]] = []
    for line in buffer_assignment_text.splitlines():
        if line.startswith(" value:"):
            found = _VALUE.match(line)
            if found and blocks:
                blocks[-1][1].append(_value(found, int(blocks[-1][0].group(1)), ranges))
        elif line.startswith("allocation "):
            found = _ALLOCATION.match(line)
            if found:
                blocks.append((found, []))
    if not platform and ":T(" in buffer_assignment_text:
        platform = "tpu"
    allocations = tuple(_allocation(head, tuple(values)) for head, values in blocks)
    return Assignment(allocations=allocations, schedule=schedule, source="text", platform=platform)


_Ranges = dict[tuple[str, Index], tuple[int, int]]


def _read_ranges(text: str) -> tuple[tuple[str, ...], _Ranges]:
    """The schedule, and the first and last position of each (instruction name, index).

    XLA ends what is alive after the last instruction one position later.
    """
    schedule: list[str] = []
    ranges: _Ranges = {}
    for line in text.splitlines():
        found = _POSITION.match(line) if not ranges else None
        if found:
            schedule.append(found.group(2))
            continue
        found = _RANGE.match(line)
        if found:
            name, index, start, end = found.groups()
            ranges[name, parse_index(index)] = (int(start), max(int(start), min(int(end), len(schedule) - 1)))
        elif line.startswith("  Live ranges at"):
            break
    return tuple(schedule), ranges


def _value(match: re.Match, allocation: int, ranges: _Ranges) -> Value:
    name, index, color, size, offset, layout = match.groups()
    numbers = parse_index(index)
    start, end = ranges.get((name, numbers), (-1, -1))
    return Value(name, numbers, int(size), allocation, int(offset), layout, int(color), start, end)


def _allocation(match: re.Match, values: tuple[Value, ...]) -> Allocation:
    number, size, rest = match.groups()
    parameter = _PARAMETER.search(rest)
    color = _COLOR.match(rest)
    # The shape of an output may hold any word, so flags are looked for outside it.
    flags = re.sub(r"\|.*\|", "", rest)
    return Allocation(
        number=int(number),
        size_bytes=int(size),
        kind=_kind(flags),
        parameter=int(parameter.group(1)) if parameter else None,
        shape_index=parse_index(parameter.group(2)) if parameter else (),
        live_out="maybe-live-out" in flags,
        color=int(color.group(1)) if color else 0,
        values=values,
    )


def _kind(flags: str) -> AllocationKind:
    for flag, kind in _KINDS:
        if flag in flags:
            return kind
    return "temp"


# The first that is found decides: a parameter may be live-out too.
_KINDS: tuple[tuple[str, AllocationKind], ...] = (
    ("thread-local", "thread_local"),
    (", parameter ", "parameter"),
    (", constant", "constant"),
    ("maybe-live-out", "output"),
)
