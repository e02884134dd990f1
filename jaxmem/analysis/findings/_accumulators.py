"""Gradient accumulators."""

from collections.abc import Sequence

from jaxmem.analysis._records import Buffer, Finding
from jaxmem.analysis.findings._words import names


def accumulators(buffers: Sequence[Buffer]) -> list[Finding]:
    """One finding for those that live within a step, and one for those that an optimizer keeps between calls."""
    found = []
    for kept, (title, cure) in _SAYS.items():
        group = [b for b in buffers if b.kind == "accumulators" and (b.op == "parameter") == kept]
        if group:
            size = sum(b.size_bytes for b in group)
            found.append(
                Finding(kind="accumulators", size_bytes=size, title=title, evidence=names(group), cure=cure),
            )
    return found


_SAYS = {
    False: (
        "gradient accumulators live beside each micro-batch's gradients",
        "One micro-batch with rematerialisation may need less than several without: compare both. "
        "MemoryConfig(accumulator_dtype='bfloat16') halves them at the price of rounding.",
    ),
    True: (
        "gradient accumulators are kept in the optimizer's state from call to call",
        "optax.MultiSteps and accumulate.multi_steps split no batch: what saves memory is calling them with smaller "
        "ones. accumulate.value_and_grad splits a batch, and keeps no accumulators between steps. "
        "multi_steps(accumulator_dtype='bfloat16') halves them at the price of rounding.",
    ),
}
