"""The numbers of a report in words, as the terminal and the page list them."""

from typing import NamedTuple

from jaxmem._display import columns
from jaxmem._units import format_bytes
from jaxmem.analysis import MemoryReport

_STATE = ("parameters", "optimizer_state", "state")
_SHARE = 0.005  # of a kind: counts and keys are not worth a word


class Number(NamedTuple):
    """A line of a list: heading and value, then what the page says beside it and what it explains."""

    heading: str
    text: str
    note: str = ""
    doc: str = ""


def numbers(report: MemoryReport, view: str) -> list[Number]:
    """What `view` lists of a report: its columns in their order, below the arguments the dtypes of the state."""
    found = []
    for each in columns(type(report), view):
        note = each.note(report) if callable(each.note) else each.note
        if not note and each.provenance.endswith("_provenance") and each.provenance_in(report) == "modelled":
            note = "modelled"
        found.append(Number(each.headings[view], each.text(report), note, each.doc))
        if each.name == "argument_bytes":
            found += [Number(f"    {kind}", text, "an argument, by dtype") for kind, text in state_dtypes(report)]
    return found


def state_dtypes(report: MemoryReport) -> list[tuple[str, str]]:
    """("optimizer state", "float32 1.00 GiB, bfloat16 512.00 MiB") and the like, of each kind of state."""
    rows = []
    for kind in _STATE:
        parts = [row for row in report.argument_dtypes if row.kind == kind]
        least = _SHARE * sum(row.size_bytes for row in parts)
        words = [f"{row.dtype} {format_bytes(row.size_bytes)}" for row in parts if row.size_bytes >= least]
        if words:
            rows.append((kind.replace("_", " "), ", ".join(words)))
    return rows
