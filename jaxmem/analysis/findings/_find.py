"""What costs bytes at the peak without need, as far as the compiled program shows it."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from jaxmem.analysis._asked import Asked
from jaxmem.analysis._donation import Undonated
from jaxmem.analysis._records import Buffer, DonationMiss, Finding
from jaxmem.analysis.attribution._origin import Origin
from jaxmem.analysis.findings._buffers import (
    accumulators,
    donation,
    draws,
    padding,
    random_bits,
    small_share,
    undonated,
)
from jaxmem.analysis.findings._invariants import invariants
from jaxmem.analysis.findings._residuals import kept_for_backward, kept_twice
from jaxmem.analysis.findings._waiting import waiting_gradients
from jaxmem.analysis.findings._wide import computed_wide, wide
from jaxmem.analysis.hlo._module import Module

_WORTH = 0.01  # of the peak: what is smaller is not worth a line


def findings(
    buffers: Sequence[Buffer],
    origins: Mapping[str, Origin],
    module: Module,
    asked: Asked,
    *,
    donation_misses: Iterable[DonationMiss] = (),
    kept_state: Sequence[Undonated] = (),
    schedule: Sequence[str] = (),
) -> tuple[Finding, ...]:
    """The findings, largest first.

    Args:
      buffers: those alive at the peak.
      origins: by the buffers' names.
      module: the compiled program.
      asked: what is analysed, and for which target.
      donation_misses: donated leaves that no output reuses.
      kept_state: arguments with state that is not donated.
      schedule: instruction names in the order in which they run.
    """
    total = sum(b.size_bytes for b in buffers)
    asked = dataclasses.replace(asked, draws=draws(module))
    activations = [b for b in buffers if b.kind == "activations"]
    found = [
        *kept_for_backward(activations, origins, module, schedule, asked),
        *waiting_gradients(buffers, module, schedule, asked),
        *undonated(kept_state, asked),
        *donation(donation_misses),
        *padding(buffers),
        *small_share(asked),
        *(computed_wide(activations, origins, module) if asked.platform == "cpu" else wide(activations, module, asked)),
        *invariants(activations, origins, module),
        *kept_twice(activations, origins),
        *random_bits(activations, asked),
        *accumulators(buffers),
    ]
    worth = [f for f in found if f.size_bytes >= _WORTH * total or not f.size_bytes]  # 0: nobody knows how many
    return tuple(sorted(worth, key=lambda f: -f.size_bytes))
