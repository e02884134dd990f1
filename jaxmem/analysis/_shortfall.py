"""Where rematerialisation frees much less than it should: how much, and what lies there instead."""

import dataclasses
from collections.abc import Callable

from jaxmem._units import format_bytes
from jaxmem.analysis._cures import is_random
from jaxmem.analysis._records import Buffer
from jaxmem.analysis._report import MemoryReport

_FAR = 0.5  # of what should be freed: what is freed less of is worth a sentence
_WORTH = 0.05  # of the plain row's peak: what should be freed less of is not
_CAUSE = 0.25  # of what should be freed: a smaller cause explains nothing


def with_shortfall(row: MemoryReport, rows: list[MemoryReport]) -> MemoryReport:
    """A row with a sentence on what its remat setting frees less than it should.

    A warning where other values lie in the place of those that the compiled step without remat keeps and this one does
    not; a note where residuals were not stored in the first place, which costs nothing.
    """
    plain = next((other for other in rows if other.remat == "none"), None)
    if plain is None or row.remat == "none" or row.temp_bytes is None or plain.temp_bytes is None:
        return row
    if row.saved_residual_bytes is None or plain.saved_residual_bytes is None:
        return row
    modelled, freed = plain.saved_residual_bytes - row.saved_residual_bytes, plain.temp_bytes - row.temp_bytes
    if modelled <= 0:
        return row
    said = (
        f"{row.remat} frees {format_bytes(modelled)} of residuals by the model, and "
        f"{format_bytes(max(0, freed))} of temporaries as compiled"
    )
    lines = []
    grown = _instead(plain, row)
    stored = _at_peak(plain, _kept) - _at_peak(row, _kept)
    if freed < _FAR * min(modelled, stored) and stored >= _WORTH * (plain.peak_bytes or 0):
        cause, size = max(grown.items(), key=lambda item: item[1])
        if size >= _CAUSE * stored:
            lines = [f"{said}: at its peak lie {format_bytes(size)} more of {cause}."]
    if freed <= 0:
        lines = [f"The saving is not borne out: {line}" for line in lines] or [
            f"The saving is not borne out: {row.remat} keeps {format_bytes(modelled)} fewer residuals than none, but "
            f"the compiled temporaries are {format_bytes(row.temp_bytes)} against {format_bytes(plain.temp_bytes)}."
        ]
    if lines:
        return dataclasses.replace(row, warnings=(*row.warnings, *lines))
    if stored > 0 and freed < _FAR * modelled and modelled - stored >= _FAR * (modelled - freed):
        note = (
            f"{said}: at its peak without remat the compiler stores {format_bytes(stored)} of them; others it computes "
            "where they are read."
        )
        return dataclasses.replace(row, notes=(*row.notes, note))
    return row


def _instead(plain: MemoryReport, row: MemoryReport) -> dict[str, int]:
    """By cause, bytes at the row's peak beyond those at the plain row's."""
    causes: dict[str, Callable[[Buffer], bool]] = {
        "random bits": _random,
        "values that are computed again, alive together": lambda b: b.phase == "recompute" and not _random(b),
        "gradients of values, and what the backward pass makes of them": lambda b: (
            b.phase == "backward" and not _random(b)
        ),
    }
    return {cause: _at_peak(row, of) - _at_peak(plain, of) for cause, of in causes.items()}


def _at_peak(report: MemoryReport, of: Callable[[Buffer], bool]) -> int:
    return sum(b.size_bytes for b in report.buffers if b.kind == "activations" and b.memory_space == "device" and of(b))


def _kept(buffer: Buffer) -> bool:
    return buffer.phase == "forward" and not _random(buffer)


def _random(buffer: Buffer) -> bool:
    return buffer.shape.startswith(("u32[", "u64[")) and is_random(buffer.op_name)
