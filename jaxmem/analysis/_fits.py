"""Whether a program fits: yes, no, or uncertain, and why."""

from typing import Literal

from jaxmem._units import format_bytes

Fits = Literal["yes", "no", "uncertain"]

# Share of the capacity left to what no compiler counts: fragmentation, the runtime, other programs.
RESERVE = 0.05


def judge_fit(
    peak_bytes: int | None,
    capacity_bytes: int | None,
    *,
    at_least_bytes: int | None = None,
    scratch_bytes: int = 0,
    of: str = "",
) -> tuple[Fits, str]:
    """The verdict and its reason.

    Args:
      peak_bytes: per device; None where unavailable.
      capacity_bytes: of one device; None where unknown.
      at_least_bytes: a lower bound of the peak, used where the peak is unavailable.
      scratch_bytes: what library calls may need on the device beyond what the compiler shows, at most.
      of: follows "the peak" in the reason, " of init".

    >>> judge_fit(2**30, 2**34)[0], judge_fit(0, None)[0], judge_fit(None, 2**34)[0]
    ('yes', 'uncertain', 'uncertain')
    """
    if capacity_bytes is None:
        return "uncertain", "the memory of this target is unknown"
    capacity = format_bytes(capacity_bytes)
    if peak_bytes is None:
        if at_least_bytes is not None and at_least_bytes > capacity_bytes:
            return "no", f"the arguments alone, {format_bytes(at_least_bytes)}, exceed the {capacity} of a device"
        return "uncertain", "the compiler gave no memory analysis"
    peak = format_bytes(peak_bytes)
    if peak_bytes > capacity_bytes:
        return "no", f"the peak{of}, {peak}, exceeds the {capacity} of a device"
    reserve = f"the {RESERVE:.0%} reserve of {capacity}"
    if scratch_bytes:
        reserve += (
            f" and {format_bytes(scratch_bytes)} for the scratch of cuDNN convolutions, which only the device tells"
        )
    if peak_bytes > capacity_bytes * (1 - RESERVE) - scratch_bytes:
        return "uncertain", f"the peak{of}, {peak}, leaves less than {reserve}"
    return "yes", f"the peak{of}, {peak}, leaves more than {reserve}"
