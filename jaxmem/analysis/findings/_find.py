"""What costs bytes at the peak without need, as far as the compiled program shows it."""

from collections.abc import Iterable, Mapping, Sequence

from jaxmem.analysis._records import Buffer, DonationMiss, Finding
from jaxmem.analysis.attribution._origin import Origin
from jaxmem.analysis.findings._buffers import accumulators, donation, padding, random_bits
from jaxmem.analysis.findings._invariants import invariants
from jaxmem.analysis.findings._residuals import kept_for_backward, kept_twice
from jaxmem.analysis.findings._wide import computed_wide, wide
from jaxmem.analysis.hlo._module import Module

_WORTH = 0.01  # of the peak: what is smaller is not worth a line


def findings(
    buffers: Sequence[Buffer],
    origins: Mapping[str, Origin],
    module: Module,
    donation_misses: Iterable[DonationMiss] = (),
    backend: str = "",
    schedule: Sequence[str] = (),
) -> tuple[Finding, ...]:
    """The findings, largest first.

    Args:
      buffers: those alive at the peak.
      origins: by the buffers' names.
      module: the compiled program.
      donation_misses: donated leaves that no output reuses.
      backend: the platform compiled for.
      schedule: instruction names in the order in which they run.
    """
    total = sum(b.size_bytes for b in buffers)
    activations = [b for b in buffers if b.kind == "activations"]
    found = [
        *kept_for_backward(activations, origins, module, schedule),
        *donation(donation_misses),
        *padding(buffers),
        *(computed_wide(activations, origins, module) if backend == "cpu" else wide(activations, module)),
        *invariants(activations, origins, module),
        *kept_twice(activations, origins),
        *random_bits(activations),
        *accumulators(buffers),
    ]
    return tuple(sorted((f for f in found if f.size_bytes >= _WORTH * total), key=lambda f: -f.size_bytes))
