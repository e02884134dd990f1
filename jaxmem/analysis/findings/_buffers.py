"""Findings that the buffers at the peak show by themselves: donation, padding, random bits, gradient accumulators."""

from collections.abc import Iterable, Sequence

from jaxmem._units import format_bytes
from jaxmem.analysis._cures import MOST_SHARE, WHOLE_TILES, Asked, donate, draw_apart, is_random, larger_share
from jaxmem.analysis._donation import Undonated
from jaxmem.analysis._records import Buffer, DonationMiss, Finding
from jaxmem.analysis.findings._words import common, groups, names, within
from jaxmem.analysis.hlo._module import Module

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


def donation(misses: Iterable[DonationMiss]) -> list[Finding]:
    """Donated arguments that no output reuses."""
    return [
        Finding(
            kind="donation_miss",
            size_bytes=miss.size_bytes,
            title=f"{miss.path} is donated, but no output reuses its buffer",
            evidence=(f"{miss.dtype_in} in, {miss.dtype_out or 'no output of this shape'} out",),
            cure="Return it with the dtype, shape and sharding that it came in with"
            + (f": cast it back to {miss.dtype_in}." if miss.dtype_out and miss.dtype_out != miss.dtype_in else "."),
        )
        for miss in misses
    ]


def undonated(kept: Sequence[Undonated], asked: Asked) -> list[Finding]:
    """State that a program returns anew and does not donate: the old one stays beside it."""
    if not kept:
        return []
    named = " and ".join(f"`{each.argument}`" for each in kept)
    cure = donate(asked, kept)
    return [
        Finding(
            kind="not_donated",
            size_bytes=sum(each.size_bytes for each in kept),
            estimated=True,  # gradients may lie in an output until it is written
            title=f"{named} {'is' if len(kept) == 1 else 'are'} returned anew and not donated: old and new state lie "
            "side by side",
            evidence=tuple(
                f"{each.argument}: {format_bytes(each.size_bytes)} of {', '.join(each.kinds).replace('_', ' ')}"
                for each in kept
            ),
            **cure.fields,
        )
    ]


def small_share(asked: Asked) -> list[Finding]:
    """A peak that would fit the GPU, if JAX were given more of it."""
    chip = asked.target.chip if asked.target else None
    if chip is None or chip.platform != "gpu" or not asked.missing_bytes or asked.capacity_bytes is None:
        return []
    gain = int(chip.hbm_bytes * MOST_SHARE) - asked.capacity_bytes
    if gain < asked.missing_bytes:
        return []
    cure = larger_share(asked)
    return [
        Finding(
            kind="small_share",
            size_bytes=gain,
            title=f"JAX is given {format_bytes(asked.capacity_bytes)} of the GPU's {format_bytes(chip.hbm_bytes)}: a "
            "larger share would hold the peak",
            **cure.fields,
        )
    ]


def padding(buffers: Sequence[Buffer]) -> list[Finding]:
    """Bytes that only fill the chip's tiles."""
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
                cure=WHOLE_TILES,
            )
        )
    return found


def _share(buffers: Sequence[Buffer]) -> float:
    return sum(b.padding_bytes for b in buffers) / sum(b.size_bytes for b in buffers)


def draws(module: Module) -> bool:
    """Whether a program draws random bits."""
    every = (i for computation in module.computations.values() for i in computation.instructions.values())
    return any(is_random(i.op_name) or i.opcode.startswith("rng") for i in every)


def random_bits(activations: Sequence[Buffer], asked: Asked) -> list[Finding]:
    """Random bits, for dropout or the like, that may be drawn otherwise."""
    group = [b for b in activations if b.shape.startswith(("u32[", "u64[")) and is_random(b.op_name)]
    cure = draw_apart(asked)
    if not group or cure is None:
        return []
    return [
        Finding(
            kind="random_bits",
            size_bytes=sum(b.size_bytes for b in group),
            title=f"{len(group)} buffers of random bits, for dropout or the like"
            + within(common([b.layer for b in group])),
            evidence=names(group),
            **cure.fields,
        )
    ]


def accumulators(buffers: Sequence[Buffer]) -> list[Finding]:
    """Gradient accumulators: one finding for those of a step, one for those that an optimizer keeps between calls."""
    by_place: dict[str, list[Buffer]] = {"within": [], "kept": []}
    for buffer in buffers:
        if buffer.kind == "accumulators":
            by_place["kept" if buffer.op == "parameter" else "within"].append(buffer)
    gradients = sum(b.size_bytes for b in buffers if b.kind == "gradients")
    found = []
    for name, group in by_place.items():
        size = sum(b.size_bytes for b in group)
        title, cure = _SAYS["in place" if name == "within" and gradients < size / 2 else name]
        if group:
            found.append(Finding(kind="accumulators", size_bytes=size, title=title, evidence=names(group), cure=cure))
    return found
