"""What other programs read: the buffers as comma-separated values, the timeline as a Chrome trace."""

import csv
import dataclasses
import io
from collections.abc import Iterable
from typing import Any

from jaxmem._display import columns
from jaxmem.analysis import Buffer, Comparison, MemoryReport, Timeline
from jaxmem.report._page import in_order
from jaxmem.report.differences import Change, Diff

_PROCESS = 1
_OPERATIONS, _LOOPS = 1, 2
_LARGEST = 1000


def buffers_csv(report: MemoryReport) -> str:
    """The buffers at the peak, largest first: a line of field names, then a line a buffer.

    Names are as the program has them; a spreadsheet may take one that begins with "=" for a formula.
    """
    return records_csv(Buffer, report.buffers)


def records_csv(cls: type, records: Iterable[Any]) -> str:
    """Records of one class as a line of field names, then a line each; a shape is written 8x1024.

    >>> from jaxmem.analysis import DtypeBytes
    >>> print(records_csv(DtypeBytes, [DtypeBytes(kind="parameters", dtype="float32", size_bytes=4)]), end="")
    kind,dtype,size_bytes
    parameters,float32,4
    """
    names = [field.name for field in dataclasses.fields(cls)]
    return _csv(names, ([_cell(getattr(record, name)) for name in names] for record in records))


def comparison_csv(comparison: Comparison) -> str:
    """A line a variant: its name and setting, then the columns of the tables of comparisons, in bytes and seconds."""
    shown = [each.name for view in ("row", "page_row") for each in columns(MemoryReport, view)]
    names = list(dict.fromkeys(["name", "target", "provenance", "remat", *shown, "capacity_bytes", "fits_reason"]))
    return _csv(names, ([getattr(row, name) for name in names] for row in comparison.rows))


def diff_csv(found: Diff) -> str:
    """A line a change, of "kinds", "layers", "buffers" and whatever else a diff lists `Change`s of."""
    names = [field.name for field in dataclasses.fields(Change)]
    parts = {field.name: getattr(found, field.name) for field in dataclasses.fields(found)}
    changes = [(part, c) for part, of in parts.items() if isinstance(of, tuple) for c in of if isinstance(c, Change)]
    return _csv(
        ["of", *names, "change_bytes"], ([part, *(getattr(c, n) for n in names), c.change_bytes] for part, c in changes)
    )


def _csv(names: list[str], rows: Iterable[list]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    return "x".join(map(str, value)) if isinstance(value, tuple) else value


def chrome_trace(report: MemoryReport) -> dict[str, Any]:
    """Counters of live bytes by kind, operations, loops, and the life of the largest buffers.

    For Perfetto (ui.perfetto.dev) or chrome://tracing. One position of the schedule is one microsecond: the trace
    shows the order of things, not their time. `json.dump` makes a trace file of what this returns; without a timeline
    it has no events but the name.
    """
    events: list[dict[str, Any]] = [
        _about("process_name", 0, f"{report.name} on {report.target}: schedule positions as µs"),
    ]
    if report.timeline is not None:
        events += [_about("thread_name", _OPERATIONS, "operations"), _about("thread_name", _LOOPS, "loops")]
        events += _operations(report.timeline)
        events += _loops(report.timeline)
        for number, buffer in enumerate(report.timeline.buffers[:_LARGEST]):
            events += _life(number, buffer)
    return {
        "traceEvents": events,
        "displayTimeUnit": "ns",
        "otherData": {
            "name": report.name,
            "target": report.target,
            "provenance": f"{report.provenance} by {report.backend}, jax {report.jax_version}",
            "peak_bytes": report.peak_bytes,
        },
    }


def _about(what: str, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": _PROCESS, "tid": thread, "args": {"name": name}}


def _operations(timeline: Timeline) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    kinds = in_order(kind for moment in timeline.moments for kind, _ in moment.by_kind)
    ends = [moment.position for moment in timeline.moments[1:]] + [timeline.length]
    for moment, end in zip(timeline.moments, ends, strict=True):
        # A counter keeps its last value: what is gone must be said to be 0.
        alive = dict(moment.by_kind)
        counter = {"ph": "C", "name": "live bytes", "pid": _PROCESS, "ts": moment.position}
        events.append({**counter, "args": {kind: alive.get(kind, 0) for kind in kinds}})
        if moment.op:
            args = {"layer": moment.layer, "shape": moment.shape, "source": moment.source}
            span = {"ts": moment.position, "dur": max(end - moment.position, 1)}
            events.append({"ph": "X", "name": moment.op, "pid": _PROCESS, "tid": _OPERATIONS, **span, "args": args})
    peak = {"ph": "i", "s": "g", "name": "peak", "pid": _PROCESS, "tid": _OPERATIONS, "ts": timeline.peak_position}
    return [*events, peak]


def _loops(timeline: Timeline) -> list[dict[str, Any]]:
    return [
        {
            "ph": "X",
            "name": loop.name if loop.trips is None else f"{loop.name} × {loop.trips}",
            "pid": _PROCESS,
            "tid": _LOOPS,
            "ts": loop.start,
            "dur": loop.end - loop.start + 1,
            "args": {"trips": loop.trips},
        }
        for loop in timeline.loops
    ]


def _life(number: int, buffer: Buffer) -> list[dict[str, Any]]:
    """A buffer as an asynchronous span, since these may overlap."""
    name = buffer.path or buffer.saved_name or buffer.name
    common = {"cat": buffer.kind, "name": name, "id": number, "pid": _PROCESS}
    fields = ("size_bytes", "layer", "op", "shape", "source", "allocation", "offset_bytes")
    args = {field: getattr(buffer, field) for field in fields}
    return [
        {"ph": "b", "tid": 0, **common, "ts": buffer.start, "args": args},
        {"ph": "e", "tid": 0, **common, "ts": buffer.end + 1},
    ]
