"""Where rematerialisation frees much less than it should: how much, and what lies there instead."""

import dataclasses
import re
from collections.abc import Callable, Sequence

from jaxmem._units import format_bytes
from jaxmem.analysis._cures import is_random
from jaxmem.analysis._records import Buffer
from jaxmem.analysis._report import MemoryReport

_FAR = 0.5  # of what should be freed: what is freed less of is worth a sentence
_WORTH = 0.05  # of the plain row's peak: what should be freed less of is not
_CAUSE = 0.25  # of what should be freed: a smaller cause explains nothing
_TOGETHER = 3  # layers; values of two may overlap where one layer's backward pass ends
_NUMBER = re.compile(r"(.*?)\d+")


def with_shortfall(row: MemoryReport, rows: Sequence[MemoryReport]) -> MemoryReport:
    """A row with a sentence on what its remat setting frees less than it should, by the buffers at both peaks.

    A warning where random bits, or values that several layers compute again, lie in the place of what is freed; a note
    where that is the working set of one layer, or where residuals were not stored in the first place.
    """
    plain = next((other for other in rows if other.remat == "none"), None)
    if plain is None or row.remat == "none" or row.temp_bytes is None or plain.temp_bytes is None:
        return row
    if row.saved_residual_bytes is None or plain.saved_residual_bytes is None:
        return row
    modelled, freed = plain.saved_residual_bytes - row.saved_residual_bytes, plain.temp_bytes - row.temp_bytes
    if modelled <= 0 or freed >= _FAR * modelled:
        return row
    said = f"{row.remat} frees {format_bytes(modelled)} of residuals by the model"
    said += f", and {format_bytes(freed)} of temporaries as compiled: " if freed > 0 else ": "
    stored = _size(plain, _kept) - _size(row, _kept)
    warning, note = "", ""
    if freed < _FAR * stored and stored >= _WORTH * (plain.peak_bytes or 0):
        warning, note = _instead(plain, row, _CAUSE * stored)
    elif stored > 0 and modelled - stored >= _FAR * (modelled - freed):
        note = (
            f"at its peak without remat the compiler stores {format_bytes(stored)} of them; others it computes where "
            "they are read"
        )
    if freed <= 0:
        why = f": {warning or note}" if warning or note else ""
        text = (
            f"The saving is not borne out: {row.remat} keeps {format_bytes(modelled)} fewer residuals than none, but "
            f"the compiled temporaries are {format_bytes(row.temp_bytes)} against {format_bytes(plain.temp_bytes)}"
            f"{why}."
        )
        return dataclasses.replace(row, warnings=(*row.warnings, text))
    if warning:
        return dataclasses.replace(row, warnings=(*row.warnings, f"{said}{warning}."))
    return dataclasses.replace(row, notes=(*row.notes, f"{said}{note}.")) if note else row


def _instead(plain: MemoryReport, row: MemoryReport, worth: float) -> tuple[str, str]:
    """What lies at the row's peak beyond what lies at the plain row's: the largest cause, as a warning or a note."""
    again = [b for b in row.buffers if _again(b)]
    layers = _layers(again)
    together = f" of {layers} layers, alive together" if layers >= _TOGETHER else ", the working set of a block"
    causes: dict[str, Callable[[Buffer], bool]] = {
        "random bits": _random,
        f"values that are computed again{together}": _again,
        "what the backward pass makes": lambda b: b.phase == "backward" and not _random(b),
    }
    grown = {cause: _size(row, of) - _size(plain, of) for cause, of in causes.items()}
    cause, size = max(grown.items(), key=lambda item: item[1])
    if size < worth:
        return "", ""
    text = f"at its peak lie {format_bytes(size)} more of {cause}"
    harms = cause == "random bits" or (causes[cause] is _again and layers >= _TOGETHER)
    return (text, "") if harms else ("", text)


def _layers(buffers: Sequence[Buffer]) -> int:
    """Of how many layers that differ in a number alone buffers are."""
    found: dict[str, set[str]] = {}
    for buffer in buffers:
        if numbered := _NUMBER.match(buffer.layer):
            found.setdefault(numbered.group(1), set()).add(numbered.group())
    return max(map(len, found.values()), default=1)


def _size(report: MemoryReport, of: Callable[[Buffer], bool]) -> int:
    return sum(b.size_bytes for b in report.buffers if b.kind == "activations" and b.memory_space == "device" and of(b))


def _kept(buffer: Buffer) -> bool:
    return buffer.phase == "forward" and not _random(buffer)


def _again(buffer: Buffer) -> bool:
    return buffer.phase == "recompute" and not _random(buffer)


def _random(buffer: Buffer) -> bool:
    return buffer.shape.startswith(("u32[", "u64[")) and is_random(buffer.op_name)
