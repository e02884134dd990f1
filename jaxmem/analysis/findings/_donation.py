"""Donated arguments that no output reuses."""

from collections.abc import Iterable

from jaxmem.analysis._records import DonationMiss, Finding


def donation(misses: Iterable[DonationMiss]) -> list[Finding]:
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
