"""The numbers that stand in a text: in sentences, and as rows of tables."""

import re
from collections.abc import Iterator, Sequence

from jaxmem._units import SIZE, size_in
from jaxmem.analysis.oom._lines import Line
from jaxmem.analysis.oom._records import OomFact

_QUOTE = 200
_GAP = 3  # lines that are no rows, after which a table has ended; so it has after an empty one

_SENTENCES = tuple(
    (names.split(), re.compile(pattern.replace("SIZE", SIZE)))
    for names, pattern in (
        # what was asked for
        ("requested", r"(?:ran out of memory|ut of memory while) trying to allocate SIZE"),
        ("requested", r"Failed to allocate request for SIZE"),
        ("requested", r"[Ff]ailed to allocate \S{1,20} \(SIZE\) (?:from device|of (?:pinned )?host memory)"),
        ("requested", r"cuMemAllocAsync failed to allocate SIZE"),
        ("requested", r"ailed to allocate (?:a )?SIZE(?:[\w\- ]{0,30}scratch|-byte| for host offloading)"),
        ("requested", r"Failed to CUDA (?:calloc|malloc|host alloc) (?:async )?SIZE"),
        ("requested", r"failed to alloc SIZE on host"),
        ("requested", r"pinned host memory of size: SIZE"),
        ("requested", r"Tried to allocate SIZE"),
        ("requested", r"Attempting to (?:allocate|reserve) SIZE"),
        ("requested", r"Out of memory allocating SIZE"),
        ("requested", r"Unable to allocate SIZE for an array"),
        ("requested", r"/dev/shm/nccl[\w\-]{0,60} to SIZE"),
        ("requested", r"Failed to malloc SIZE"),
        # what there is, and what is left of it
        ("used limit", r"Used SIZE of SIZE \w{1,10}"),
        ("exceeded", r"Exceeded \w{1,10} capacity by SIZE"),
        ("used limit", r"HLO temporaries \(SIZE\) exceeds available HBM \(SIZE\)"),
        ("used limit", r"Requires SIZE, has SIZE available"),
        (
            "requested limit exceeded",
            r"with size SIZE and limit SIZE exceeded scoped \w{1,10} limit by SIZE",
        ),
        ("requested limit", r"Allocation \(size=SIZE\) would exceed memory \(size=SIZE\)"),
        ("requested largest_free free", r"allocate SIZE in memory \w{1,40}; SIZE allocatable, SIZE available"),
        ("free", r"There are SIZE free"),
        ("reservable", r"reserved, and SIZE reservable"),
        ("largest_free", r"largest contiguous region of free memory is SIZE"),
        ("largest_free", r"Max free chunk {1,30}SIZE"),
        ("limit", r"HBM capacity SIZE:"),
        ("total", r"Total \w{1,10} usage >= SIZE"),
        ("outputs", r"Output size SIZE"),
        ("fragmentation", r"fragmentation \(SIZE\)"),
        # the allocator's statistics
        ("limit", r"(?:^\W{0,40}|Stats: {1,8})Limit: {1,40}SIZE"),
        ("in_use", r"(?:^|[\s,;])InUse: {1,40}SIZE"),
        ("most_in_use", r"(?:^|[\s,;])MaxInUse: {1,40}SIZE"),
        ("largest_allocation", r"(?:^|[\s,;])MaxAllocSize: {1,40}SIZE"),
        ("limit", r"memory_limit_: SIZE"),
        ("in_use", r"Sum Total of in-use chunks: SIZE"),
        # the host's
        ("resident", r"anon-rss:SIZE"),
        ("virtual", r"total-vm:SIZE"),
        ("limit", r"memory: usage \S{1,30}, limit SIZE"),
        ("used limit", r"Memory on the node .{0,99}? was SIZE / SIZE"),
    )
)
_OF_THE_POOL = ("limit", "in_use", "most_in_use", "largest_allocation")
_FREE_CHUNK = re.compile(r"Free {1,4}at [0-9a-fx]{1,20} of size " + SIZE)

_TABLE = re.compile(
    r"(Total \w{1,10} usage >=|HBM capacity|Persistent allocations include|Program \w{1,10} requirement"
    r"|Heap allocator status|BufferAssignment stats)|Peak buffers"
)
_ROW = re.compile(
    rf"(?:^\s{{0,40}}|\s{{3}})([A-Za-z][A-Za-z_ \-]{{0,50}}?) ?(?:\([^()]{{0,80}}\))?(?::\s*|\s+){SIZE}(?=[\s(;]|$)"
)
_NAMES = {
    "hlo_temp": "temporaries",
    "preallocated_temp_allocation": "temporaries",
    "preallocated_temp_fragmentation": "temporaries_fragmentation",
    "parameter_allocation": "arguments",
    "constant_allocation": "constants",
    "maybe_live_out_allocation": "outputs",
    "total_allocation": "total",
    "total_fragmentation": "fragmentation",
    "output": "outputs",
    "currently_allocated": "allocated",
    "max_free_chunk": "largest_free",
}
_TOO = frozenset({"reserved", "arguments"})  # rows of a program's own, smaller ones than the table above has


def requested_in(text: str) -> int | None:
    """What a report says was asked for, or needed in all."""
    for names, pattern in _SENTENCES:
        if names[0] in ("requested", "used") and (found := pattern.search(text)):
            return size_in(found)
    return None


def facts_in(lines: Sequence[Line]) -> tuple[OomFact, ...]:
    """Every number of `lines`, in their order; the first of a name counts."""
    facts: dict[str, OomFact] = {}
    for fact in sorted((*_sentences(lines), *_rows(lines), *_free_chunks(lines)), key=lambda fact: fact.line):
        facts.setdefault(fact.name, fact)
    return tuple(facts.values())


def statistics_in(lines: Sequence[Line]) -> tuple[OomFact, ...]:
    """The last limit and use of a pool, or limit of a control group, that an allocator or the kernel printed."""
    facts: dict[str, OomFact] = {}
    for fact in _sentences(lines):
        if fact.name in _OF_THE_POOL:
            facts[fact.name] = fact
    is_whole = {"limit", "in_use"} <= facts.keys() or any("usage" in fact.quote for fact in facts.values())
    return tuple(facts.values()) if is_whole else ()


def _sentences(lines: Sequence[Line]) -> Iterator[OomFact]:
    for line in lines:
        if any(letter.isdigit() for letter in line.text):
            for names, pattern in _SENTENCES:
                if found := pattern.search(line.text):
                    for index, name in enumerate(names):
                        yield from _fact(name, found, line, 2 * index + 1)


def _rows(lines: Sequence[Line]) -> Iterator[OomFact]:
    table, gap = "", 0
    for line in lines:
        if found := _TABLE.search(line.text):
            table, gap = found[1] or "", 0
        elif table and (found := _ROW.search(line.text)) and found[3]:
            gap = 0
            name = found[1].strip().lower().replace(" ", "_").replace("-", "_")
            name = _NAMES.get(name, name)
            own = "program_" if table.startswith("Program") and name in _TOO else ""
            yield from _fact(own + name, found, line, 2)
        else:
            gap += 1
            table = table if gap < _GAP and line.text.strip() else ""


def _free_chunks(lines: Sequence[Line]) -> Iterator[OomFact]:
    chunks = [(size_in(found) or 0, found, line) for line in lines if (found := _FREE_CHUNK.search(line.text))]
    if chunks:
        _, found, line = max(chunks, key=lambda chunk: chunk[0])
        yield from _fact("largest_free", found, line)


def _fact(name: str, found: re.Match, line: Line, group: int = 1) -> Iterator[OomFact]:
    size = size_in(found, group)
    if size is not None:
        quote = line.text[max(found.start() - 20, 0) : found.end() + 40].strip()[:_QUOTE]
        yield OomFact(name=name, size_bytes=size, line=line.number, quote=quote)
