"""Gradient accumulators."""

from collections.abc import Sequence

from jaxmem.analysis._records import Buffer, Finding
from jaxmem.analysis.findings._words import names


def accumulators(buffers: Sequence[Buffer]) -> list[Finding]:
    """One finding for those that live within a step, and one for those that an optimizer keeps between calls."""
    groups: dict[str, list[Buffer]] = {"within": [], "kept": []}
    for buffer in buffers:
        if buffer.kind == "accumulators":
            groups["kept" if buffer.op == "parameter" else "within"].append(buffer)
    gradients = sum(b.size_bytes for b in buffers if b.kind == "gradients")
    found = []
    for name, group in groups.items():
        size = sum(b.size_bytes for b in group)
        title, cure = _SAYS["in place" if name == "within" and gradients < size / 2 else name]
        if group:
            found.append(Finding(kind="accumulators", size_bytes=size, title=title, evidence=names(group), cure=cure))
    return found


_COMPARE = "One micro-batch with rematerialisation may need less than several without: compare both."
_SAYS = {
    "within": (
        "gradient accumulators live beside each micro-batch's gradients",
        f"{_COMPARE} MemoryConfig(accumulator_dtype='bfloat16') halves them at the price of rounding.",
    ),
    # Accumulators of another dtype than the parameters' would need gradients beside them again.
    "in place": ("gradient accumulators live from the first micro-batch to the optimizer's update", _COMPARE),
    "kept": (
        "gradient accumulators are kept in the optimizer's state from call to call",
        "optax.MultiSteps and accumulate.multi_steps split no batch: what saves memory is calling them with smaller "
        "ones. accumulate.value_and_grad splits a batch, and keeps no accumulators between steps. "
        "multi_steps(accumulator_dtype='bfloat16') halves them at the price of rounding.",
    ),
}
