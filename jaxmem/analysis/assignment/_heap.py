"""Packs blocks into one allocation, as XLA does: some take the place of another, the rest are placed by best fit."""

import bisect
import dataclasses
import itertools

from jaxmem.analysis.assignment._flow import Flow
from jaxmem.analysis.hlo._module import Computation, Module

_BUCKETS = 256
_ELEMENTWISE = frozenset(
    """abs add and atan2 bitcast bitcast-convert cbrt ceil clamp clz compare complex convert copy cosine divide erf
    exponential exponential-minus-one floor imag is-finite log log-plus-one logistic maximum minimum multiply negate not
    or popcnt power real reduce-precision remainder round-nearest-afz round-nearest-even rsqrt select shift-left
    shift-right-arithmetic shift-right-logical sign sine sqrt subtract tan tanh xor""".split()
)
_TRIES = 32  # of hundreds of outputs that are as large, these are tried
_COPIES = ("copy", "bitcast")  # alone they move nothing over itself


@dataclasses.dataclass(kw_only=True)
class Block:
    """Bytes that are needed at some times: `spans` are (first, last) positions, sorted and without overlap."""

    size_bytes: int
    spans: list[tuple[int, int]]


def pack(blocks: dict[int, Block], alignment: int) -> tuple[int, dict[int, int]]:
    """Size of the allocation, and the offset of each block: largest first, each into the smallest gap it fits.

    >>> blocks = {1: Block(size_bytes=8, spans=[(0, 2)]), 2: Block(size_bytes=8, spans=[(3, 4)])}
    >>> pack(blocks | {3: Block(size_bytes=4, spans=[(2, 3)])}, 4)
    (12, {1: 0, 2: 0, 3: 8})
    """
    length = max((block.spans[-1][1] for block in blocks.values()), default=0) + 1
    width = max(1, -(-length // _BUCKETS))
    placed: dict[int, set[int]] = {}
    offsets: dict[int, int] = {}
    total = 0
    order = sorted(blocks, key=lambda k: (-blocks[k].size_bytes, -_duration(blocks[k]), blocks[k].spans[0], k))
    for key in order:
        block = blocks[key]
        buckets = {b for start, end in block.spans for b in range(start // width, end // width + 1)}
        near = set().union(*(placed.get(bucket, ()) for bucket in buckets))
        taken = sorted(
            (offsets[other], offsets[other] + blocks[other].size_bytes)
            for other in near
            if overlap(block, blocks[other])
        )
        offsets[key] = _best_fit(taken, block.size_bytes, alignment)
        total = max(total, offsets[key] + block.size_bytes)
        for bucket in buckets:
            placed.setdefault(bucket, set()).add(key)
    return total, offsets


def overlap(one: Block, other: Block) -> bool:
    """Whether two blocks are alive at the same position."""
    few, many = sorted((one.spans, other.spans), key=len)
    for start, end in few:
        # The first span of the other that ends at or after this one's start decides.
        place = bisect.bisect_left(many, start, key=lambda span: span[1])
        if place < len(many) and many[place][0] <= end:
            return True
    return False


def _duration(block: Block) -> int:
    return block.spans[-1][1] - block.spans[0][0]


def _best_fit(taken: list[tuple[int, int]], size: int, alignment: int) -> int:
    """The offset of the smallest gap that is large enough; above everything where there is none."""
    best, best_gap, reached = None, 0, 0
    for low, high in taken:
        if low - reached >= size and (best is None or low - reached < best_gap):
            best, best_gap = reached, low - reached
        reached = max(reached, -(-high // alignment) * alignment)
    return reached if best is None else best


def reuse(flow: Flow, module: Module, blocks: dict[int, Block], outputs: set[int]) -> dict[int, int]:
    """Merges blocks where a result may take a dying operand's place; returns the block that each merged one is in.

    `blocks` loses the merged ones. Those of `outputs` stay, and are merged with temporaries only.
    """
    positions = {name: position for position, name in enumerate(flow.schedule)}
    merged: dict[int, int] = {}

    def home(number: int) -> int:
        number = flow.buffer(number)
        while number in merged:
            number = merged[number]
        return number

    for name, operands in flow.operands.items():
        allowed = _elementwise_operands(module, name)
        if not allowed:
            continue
        for result in flow.held[name].values():
            for number in allowed:
                given = operands[number].get(()) if number < len(operands) else None
                if given is None:
                    continue
                one, other = home(given), home(result)
                if one == other or one not in blocks or other not in blocks or {one, other} <= outputs:
                    continue
                spans = _joined(blocks[one], blocks[other], positions[name])
                if spans is not None:
                    stays, goes = (other, one) if other in outputs else (one, other)
                    blocks[stays].spans = spans
                    del blocks[goes]
                    merged[goes] = stays
                    break
    return {buffer: home(buffer) for buffer in merged}


def move_into_outputs(blocks: dict[int, Block], outputs: set[int]) -> dict[int, int]:
    """Puts temporaries where an output will lie that is not there yet; returns the output's block of each.

    `blocks` loses them. Largest first, each into the smallest output that is large enough, as XLA does.
    """
    hosts = sorted((b for b in blocks if b in outputs), key=lambda b: blocks[b].size_bytes)
    sizes = [blocks[b].size_bytes for b in hosts]
    moved: dict[int, int] = {}
    for buffer in sorted((b for b in blocks if b not in outputs), key=lambda b: -blocks[b].size_bytes):
        first = bisect.bisect_left(sizes, blocks[buffer].size_bytes)
        for host in hosts[first : first + _TRIES]:
            if not overlap(blocks[host], blocks[buffer]):
                blocks[host].spans = sorted(blocks[host].spans + blocks[buffer].spans)
                del blocks[buffer]
                moved[buffer] = host
                break
    return moved


def _joined(one: Block, other: Block, position: int) -> list[tuple[int, int]] | None:
    """The spans of both, if they are of one size and meet only at `position`, where one ends and the other begins."""
    if one.size_bytes != other.size_bytes:
        return None
    spans = sorted(one.spans + other.spans)
    for (_, end), (start, _) in itertools.pairwise(spans):
        if start < end or (start == end and start != position):
            return None
    return spans


def _elementwise_operands(module: Module, name: str) -> list[int]:
    """Numbers of the operands of which an instruction reads only the element that it writes."""
    instruction = module.instruction(name)
    if instruction is None:
        return []
    if instruction.opcode in _ELEMENTWISE and instruction.opcode not in _COPIES:
        return list(range(len(instruction.operands)))
    called = module.callee(instruction) if instruction.opcode == "fusion" else None
    return _elementwise_parameters(called) if called else []


def _elementwise_parameters(called: Computation) -> list[int]:
    """Parameters that reach the root, or the elements of its tuple, through elementwise instructions only."""
    straight, other = set(), set()
    roots = [i for i in called.instructions.values() if i.is_root]
    straight.update(i.name for i in roots)
    for instruction in reversed(called.instructions.values()):
        name = instruction.name
        passes = instruction.opcode in _ELEMENTWISE or instruction.opcode == "tuple"
        for operand in instruction.operands if instruction.opcode not in ("parameter", "constant") else ():
            if name in straight and passes:
                straight.add(operand)
            if name in other or (name in straight and not passes):
                other.add(operand)
    return [
        int(i.literal)
        for i in called.instructions.values()
        if i.opcode == "parameter" and i.name in straight and i.name not in other
    ]
