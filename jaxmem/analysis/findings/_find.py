"""What costs bytes at the peak without need, as far as the compiled program shows it."""

from collections.abc import Iterable, Mapping, Sequence

from jaxmem.analysis._records import Buffer, DonationMiss, Finding
from jaxmem.analysis.attribution._graph import Graph
from jaxmem.analysis.attribution._origin import Origin
from jaxmem.analysis.findings._accumulators import accumulators
from jaxmem.analysis.findings._donation import donation
from jaxmem.analysis.findings._invariants import invariants
from jaxmem.analysis.findings._padding import padding
from jaxmem.analysis.findings._random_bits import random_bits
from jaxmem.analysis.findings._residuals import kept_for_backward, kept_twice
from jaxmem.analysis.findings._wide import computed_wide, wide

_WORTH = 0.01  # of the peak: what is smaller is not worth a line


def findings(
    buffers: Sequence[Buffer],
    origins: Mapping[str, Origin],
    graph: Graph,
    donation_misses: Iterable[DonationMiss] = (),
    backend: str = "",
    schedule: Sequence[str] = (),
) -> tuple[Finding, ...]:
    """The findings, largest first.

    Args:
      buffers: those alive at the peak.
      origins: by the buffers' names.
      graph: of the compiled module.
      donation_misses: donated leaves that no output reuses.
      backend: the platform compiled for.
      schedule: instruction names in the order in which they run.
    """
    total = sum(b.size_bytes for b in buffers)
    activations = [b for b in buffers if b.kind == "activations"]
    found = [
        *kept_for_backward(activations, origins, graph, schedule),
        *donation(donation_misses),
        *padding(buffers),
        *(computed_wide(activations, origins, graph) if backend == "cpu" else wide(activations, graph)),
        *invariants(activations, origins, graph),
        *kept_twice(activations, origins),
        *random_bits(activations),
        *accumulators(buffers),
    ]
    return tuple(sorted((f for f in found if f.size_bytes >= _WORTH * total), key=lambda f: -f.size_bytes))
