"""What a terminal and the page show of a report: texts and widths, made from the records."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxmem._display import columns, table_columns
from jaxmem._units import format_bytes, format_flops, format_seconds, format_share
from jaxmem.analysis import KINDS, Comparison, MemoryReport
from jaxmem.report._page import in_order

VERDICTS = {"yes": "Fits", "no": "Does not fit", "uncertain": "Uncertain"}
_STATE = ("parameters", "optimizer_state", "state")
_SHARE = 0.005  # of a kind: counts and keys are not worth a word


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a bar: `share` of the peak and `width` of the whole bar, both in percent."""

    kind: str
    style: str
    label: str
    size: str
    share: str
    width: str


def label(kind: str) -> str:
    """A kind as people read it.

    >>> label("optimizer_state")
    'optimizer state'
    """
    return kind.replace("_", " ")


def style(kind: str) -> str:
    """The CSS class of a kind; one that has no colour of its own gets that of the unattributed."""
    return f"kind-{kind if kind in KINDS else 'unattributed'}".replace("_", "-")


def format_change(change: int) -> str:
    """Bytes with their sign.

    >>> format_change(2048), format_change(-2048), format_change(0)
    ('+2.0 KiB', '−2.0 KiB', '0 B')
    """
    sign = "+" if change > 0 else "−" if change < 0 else ""
    return sign + format_bytes(abs(change))


def report_view(report: MemoryReport) -> dict[str, Any]:
    """All of one report that is not drawn by script: its fields, and texts and widths made of them."""
    scale = max(report.peak_bytes or 0, report.capacity_bytes or 0)
    return {
        **vars(report),
        "origin": f"{report.provenance} by {report.backend}, jax {report.jax_version}",
        "verdict": VERDICTS[report.fits],
        "peak": format_bytes(report.peak_bytes),
        "capacity": format_bytes(report.capacity_bytes) if report.capacity_bytes else "",
        "of_capacity": format_share(report.peak_bytes, report.capacity_bytes),
        "capacity_width": _width(report.capacity_bytes, scale),
        "capacity_early": bool(report.capacity_bytes and report.capacity_bytes < scale / 4),
        "kinds": segments(report, report.peak_bytes or 0),
        "bar": segments(report, scale),
        "modelled": bool(report.by_kind) and report.buffer_provenance == "modelled",
        "facts": facts(report),
        "phases": other_phases(report),
    }


def segments(report: MemoryReport, scale: int) -> list[Segment]:
    """The peak by kind; one part of no kind where only the peak is known."""
    sizes = dict(report.by_kind) or {"unattributed": report.peak_bytes or 0}
    return [
        Segment(
            kind=kind,
            style=style(kind),
            label=label(kind),
            size=format_bytes(sizes[kind]),
            share=format_share(sizes[kind], report.peak_bytes),
            width=_width(sizes[kind], scale),
        )
        for kind in in_order(sizes)
        if sizes[kind] > 0
    ]


def other_phases(report: MemoryReport) -> list[tuple[str, str]]:
    """("init 2.1 GiB*", how that is told) and the like, of each phase of a run but the steps; a star is "modelled"."""
    others = [phase for phase in report.phases if phase.name != "step"]
    star = {"modelled": "*"}
    return [(f"{p.name} {format_bytes(p.peak_bytes)}{star.get(p.provenance, '')}", p.how) for p in others]


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
            rows.append((label(kind), ", ".join(words)))
    return rows


def facts(report: MemoryReport) -> list[Number]:
    """The numbers that are known; of the host's only those that are not 0."""
    listed = [number._replace(heading=number.heading.strip()) for number in numbers(report, "page")]
    return [number for number in listed if number.text != "-" and number[:2] != ("host temporaries", "0 B")]


def comparison_view(rows: Sequence[MemoryReport]) -> dict[str, Any]:
    """The variants with bars on one scale, and every kind that one of them has."""
    scale = max([*(row.peak_bytes or 0 for row in rows), 1])
    shown = table_columns(rows, "page_row")
    kinds = in_order(kind for row in rows for kind, size in row.by_kind if size > 0)
    known = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    return {
        "rows": [
            {
                "view": report_view(row),
                "bar": segments(row, scale),
                "least": bool(known) and row.peak_bytes == min(known) and len(rows) > 1,
                "cells": [(each.text(row), getattr(row, each.name)) for each in shown],
                "by_kind": [format_bytes(dict(row.by_kind).get(kind)) for kind in kinds],
            }
            for row in rows
        ],
        "columns": [(each.headings["page_row"], each.doc) for each in shown],
        "kinds": [(label(kind), style(kind)) for kind in kinds],
        "choices": [(choice.target, str(choice)) for choice in Comparison(rows=tuple(rows), target="").choices],
    }


def said_of(rows: Sequence[MemoryReport], field: str) -> list[tuple[str, str]]:
    """Each sentence of `warnings` or `notes`, and the names of the rows that have it; "" where that is all of them."""
    said: dict[str, list[str]] = {}
    for row in rows:
        for sentence in getattr(row, field):
            said.setdefault(sentence, []).append(row.name)
    between = "; " if any("," in row.name for row in rows) else ", "
    return [(sentence, "" if len(of) == len(rows) else between.join(of)) for sentence, of in said.items()]


def frontier_points(comparison: Comparison) -> list[dict[str, Any]]:
    """What the plot of peak against recompute or time is drawn from."""
    fields = ("peak_bytes", "recompute_flops", "step_seconds", "fits")
    return [
        {
            "name": row.name[:80],
            **{field: getattr(row, field) for field in fields},
            "texts": {
                "recompute_flops": format_flops(row.recompute_flops),
                "step_seconds": f"{format_seconds(row.step_seconds)} (estimate)",
            },
        }
        for row in comparison.rows
    ]


def _width(part: int | None, whole: int | None) -> str:
    return f"{100 * (part or 0) / whole:.3f}%" if whole else "0%"
