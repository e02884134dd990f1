"""Which variant to take: the fastest that fits, or how far the smallest is from fitting."""

import dataclasses
from collections.abc import Sequence

from jaxmem._shown import Brief
from jaxmem._units import format_bytes, format_flops, format_seconds
from jaxmem.analysis._fits import Fits
from jaxmem.analysis._report import MemoryReport


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice(Brief):
    """The cheapest of the variants of one target that fit; the smallest where none does.

    Args:
      target: name of the target.
      name: of the variant; empty where no peak is known.
      fits: "yes"; "uncertain" where it is the cheapest of those that may fit, and none does for sure; "no".
      missing_bytes: by how much the worst phase of the smallest exceeds the device's memory, where none fits.
      text: all of this in a sentence.
    """

    target: str
    name: str
    fits: Fits
    missing_bytes: int | None = None
    text: str = dataclasses.field(repr=False)

    def __str__(self) -> str:
        return self.text


def choose(rows: Sequence[MemoryReport]) -> Choice:
    """The choice among the rows of one target, of which there is at least one.

    The cheapest has the least estimated time, or, where times are unknown, the least to recompute; of equals the
    smaller.
    """
    target = rows[0].target
    headings: dict[Fits, str] = {"yes": "cheapest that fits", "uncertain": "none fits for sure; cheapest that may"}
    for fits, heading in headings.items():
        fitting = [row for row in rows if row.fits == fits and row.peak_bytes is not None]
        if fitting:
            row = _cheapest(fitting)
            return Choice(target=target, name=row.name, fits=fits, text=f"{heading}: {row.name}, {_costs(row)}")
    known = [row for row in rows if row.most_bytes is not None and row.capacity_bytes is not None]
    if not known:
        fits = "uncertain" if any(row.fits != "no" for row in rows) else "no"
        return Choice(target=target, name="", fits=fits, text="no peak is known: whether any fits cannot be told")
    row = min(known, key=lambda row: row.most_bytes or 0)
    missing = max(0, (row.most_bytes or 0) - (row.capacity_bytes or 0))
    text = f"none fits: {row.name}, the smallest, needs {format_bytes(missing)} more than the "
    text += f"{format_bytes(row.capacity_bytes)} of a device"
    return Choice(target=target, name=row.name, fits="no", missing_bytes=missing, text=text)


def _cheapest(rows: Sequence[MemoryReport]) -> MemoryReport:
    timed = all(row.step_seconds is not None for row in rows)
    return min(rows, key=lambda r: ((r.step_seconds if timed else r.recompute_flops) or 0, r.peak_bytes or 0))


def _costs(row: MemoryReport) -> str:
    """What a row costs, with where the numbers are from."""
    peak = f"peak {format_bytes(row.peak_bytes)} ({row.provenance})"
    if row.step_seconds is not None:
        return f"{format_seconds(row.step_seconds)} a step (estimate), {peak}"
    if row.recompute_flops is not None:
        return f"{format_flops(row.recompute_flops)} recomputed, {peak}"
    return peak
