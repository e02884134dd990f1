"""What the HTML templates show of a report: text and widths, made from the records."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxmem._units import format_bytes, format_flops, format_seconds
from jaxmem.analysis import KINDS, Comparison, MemoryReport
from jaxmem.report._columns import in_order
from jaxmem.report._dtypes import state_dtypes

VERDICTS = {"yes": "Fits", "no": "Does not fit", "uncertain": "Uncertain"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A part of a bar: `share` of the peak and `width` of the whole bar, both in percent."""

    kind: str
    style: str
    label: str
    size_bytes: int
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


def report_view(report: MemoryReport, *, scale_bytes: int = 0) -> dict[str, Any]:
    """Everything of one report that is not drawn by script.

    Args:
      report: what is shown.
      scale_bytes: what the whole width of the capacity bar stands for; 0 for its own peak or capacity.
    """
    scale = max(scale_bytes, report.peak_bytes or 0, report.capacity_bytes or 0)
    return {
        "name": report.name,
        "target": report.target,
        "origin": f"{report.provenance} by {report.backend}, jax {report.jax_version}",
        "remat": report.remat,
        "devices": report.devices,
        "fits": report.fits,
        "verdict": VERDICTS[report.fits],
        "reason": report.fits_reason,
        "peak": format_bytes(report.peak_bytes),
        "capacity": format_bytes(report.capacity_bytes) if report.capacity_bytes else "",
        "of_capacity": _percent(report.peak_bytes, report.capacity_bytes) if report.capacity_bytes else "",
        "capacity_width": _width(report.capacity_bytes, scale),
        "capacity_early": bool(report.capacity_bytes and report.capacity_bytes < scale / 4),
        "kinds": segments(report, report.peak_bytes or 0),
        "bar": segments(report, scale),
        "modelled": bool(report.by_kind) and report.buffer_provenance == "modelled",
        "facts": facts(report),
        "findings": report.findings,
        "donation_misses": report.donation_misses,
        "warnings": report.warnings,
    }


def segments(report: MemoryReport, scale: int) -> list[Segment]:
    """The peak by kind; one part of no kind where only the peak is known."""
    sizes = dict(report.by_kind) or {"unattributed": report.peak_bytes or 0}
    return [
        Segment(
            kind=kind,
            style=style(kind),
            label=label(kind),
            size_bytes=sizes[kind],
            size=format_bytes(sizes[kind]),
            share=_percent(sizes[kind], report.peak_bytes),
            width=_width(sizes[kind], scale),
        )
        for kind in in_order(sizes)
        if sizes[kind] > 0
    ]


def facts(report: MemoryReport) -> list[tuple[str, str, str]]:
    """(name, value, note) of the numbers that are known."""
    rows: list[tuple[str, str, str]] = []

    def add(name: str, value: int | None, note: str = "", form=format_bytes):
        if value is not None:
            rows.append((name, form(value), note))

    add("arguments", report.argument_bytes, "" if report.argument_provenance == "compiled" else "modelled")
    rows += [(kind, dtypes, "an argument, by dtype") for kind, dtypes in state_dtypes(report)]
    add("outputs", report.output_bytes)
    add("temporaries", report.temp_bytes)
    add("aliased", report.alias_bytes, "outputs in donated arguments")
    add("host temporaries", report.host_temp_bytes or None)
    add("padding at peak", report.padding_bytes)
    add("compiler's own peak", report.compiler_peak_bytes)
    add("saved residuals", report.saved_residual_bytes, "modelled, one micro-batch")
    add("forward", report.forward_flops, "modelled, all devices", format_flops)
    add("whole program", report.flops, "per device", format_flops)
    add("recomputed", report.recompute_flops, "per device", format_flops)
    if report.gradient_reductions is not None:
        add("gradients reduced", report.gradient_reduction_bytes, f"{report.gradient_reductions:.3g} times a step")
    time = report.step_time
    if time is not None:
        by = "the compiler's cycles" if time.method == "compiler_cycles" else "a roofline"
        filled = f", {time.filled_share:.0%} filled by a roofline" if time.filled_share and by[0] == "t" else ""
        rows.append(("step time", format_seconds(time.seconds), f"estimate by {by}{filled}"))
    elif report.step_seconds is not None:
        rows.append(("step time", format_seconds(report.step_seconds), "estimate"))
    return rows


def comparison_view(rows: Sequence[MemoryReport]) -> dict[str, Any]:
    """The variants with bars on one scale, and every kind that one of them has."""
    scale = max([*(row.peak_bytes or 0 for row in rows), 1])
    kinds = in_order(kind for row in rows for kind, size in row.by_kind if size > 0)
    known = [row.peak_bytes for row in rows if row.peak_bytes is not None]
    return {
        "rows": [
            {
                "view": report_view(row),
                "bar": segments(row, scale),
                "least": bool(known) and row.peak_bytes == min(known) and len(rows) > 1,
                "temp": format_bytes(row.temp_bytes),
                "residuals": format_bytes(row.saved_residual_bytes),
                "recompute": format_flops(row.recompute_flops),
                "seconds": format_seconds(row.step_seconds),
                "by_kind": [format_bytes(dict(row.by_kind).get(kind)) for kind in kinds],
                "sort": [
                    row.peak_bytes,
                    row.temp_bytes,
                    row.saved_residual_bytes,
                    row.recompute_flops,
                    row.step_seconds,
                ],
            }
            for row in rows
        ],
        "kinds": [(label(kind), style(kind)) for kind in kinds],
    }


def frontier_points(comparison: Comparison) -> list[dict[str, Any]]:
    """What the plot of peak against recompute or time is drawn from."""
    return [
        {
            "name": row.name[:80],
            "peak_bytes": row.peak_bytes,
            "recompute_flops": row.recompute_flops,
            "step_seconds": row.step_seconds,
            "fits": row.fits,
        }
        for row in comparison.rows
    ]


def _percent(part: int | None, whole: int | None) -> str:
    if not whole or part is None:
        return ""
    share = 100 * part / whole
    return "<0.1 %" if 0 < share < 0.05 else f"{share:.1f} %"


def _width(part: int | None, whole: int | None) -> str:
    return f"{100 * (part or 0) / whole:.3f}%" if whole else "0%"
