"""Random bits, for dropout or the like."""

from collections.abc import Sequence

from jaxmem.analysis._records import Buffer, Finding
from jaxmem.analysis.findings._words import common, names, within

_RANDOM = ("threefry", "random_bits", "_bernoulli", "_uniform", "random_wrap", "rng_bit_generator")


def random_bits(activations: Sequence[Buffer]) -> list[Finding]:
    group = [b for b in activations if b.shape.startswith(("u32[", "u64[")) and any(r in b.op_name for r in _RANDOM)]
    if not group:
        return []
    return [
        Finding(
            kind="random_bits",
            size_bytes=sum(b.size_bytes for b in group),
            title=f"{len(group)} buffers of random bits, for dropout or the like"
            + within(common([b.layer for b in group])),
            evidence=names(group),
            cure="Use the hardware's generator, jax.config.update('jax_default_prng_impl', 'rbg') (other numbers, as "
            "random), or drop out a smaller array.",
        )
    ]
