"""Gradient accumulators."""

from collections.abc import Sequence

from jaxmem.analysis._records import Buffer, Finding
from jaxmem.analysis.findings._words import names


def accumulators(buffers: Sequence[Buffer]) -> list[Finding]:
    group = [b for b in buffers if b.kind == "accumulators"]
    if not group:
        return []
    return [
        Finding(
            kind="accumulators",
            size_bytes=sum(b.size_bytes for b in group),
            title="gradient accumulators live beside each micro-batch's gradients",
            evidence=names(group),
            cure="One micro-batch with rematerialisation may need less than several without: compare both. "
            "MemoryConfig(accumulator_dtype='bfloat16') halves them at the price of rounding.",
        )
    ]
