"""Packs blocks that live at different times into one allocation: best fit, largest first, as XLA does."""

import dataclasses
from bisect import bisect_left

_BUCKETS = 256


@dataclasses.dataclass(kw_only=True)
class Block:
    """Bytes that are needed at some times: `spans` are (first, last) positions, sorted and without overlap."""

    size_bytes: int
    spans: list[tuple[int, int]]


def pack(blocks: dict[int, Block], alignment: int) -> tuple[int, dict[int, int]]:
    """Size of the allocation, and the offset of each block.

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
        place = bisect_left(many, start, key=lambda span: span[1])
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
