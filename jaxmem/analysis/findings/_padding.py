"""Bytes that only fill the chip's tiles."""

from collections.abc import Sequence

from jaxmem.analysis._records import Buffer, Finding
from jaxmem.analysis.findings._words import groups, names, within


def padding(buffers: Sequence[Buffer]) -> list[Finding]:
    found = []
    for (shape, layer), group in groups(
        [b for b in buffers if b.padding_bytes > 0.05 * b.size_bytes], lambda b: (b.shape, b.layer)
    ).items():
        found.append(
            Finding(
                kind="padding",
                size_bytes=sum(b.padding_bytes for b in group),
                title=f"{shape}{within(layer)} is padded to the chip's tiles: {_share(group):.0%} of it holds nothing",
                evidence=names(group),
                cure="Make the two minor dimensions multiples of the tile (128 lanes; 8 rows of 32 bits, 16 of 16 "
                "bits), or move a large axis last.",
            )
        )
    return found


def _share(buffers: Sequence[Buffer]) -> float:
    return sum(b.padding_bytes for b in buffers) / sum(b.size_bytes for b in buffers)
