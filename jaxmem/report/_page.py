"""The data of a page: a report as arrays, strings coded by a dictionary, the timeline as what changes.

A hundred unrolled layers have thousands of buffers and many more moments; as objects they would be
tens of megabytes of JSON.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

from jaxmem._display import columns
from jaxmem.analysis import KINDS, Buffer, MemoryReport, Moment, Timeline

NUMBERS = tuple(field.name for field in dataclasses.fields(Buffer) if field.type is int)
TEXTS = tuple(field.name for field in dataclasses.fields(Buffer) if field.type is not int)
LONGEST_TEXT = 400
_OF_MOMENTS = ("op", "layer", "source", "shape", "phase")


class Strings:
    """Strings by number, in the order in which they are met; the empty one is 0.

    >>> strings = Strings()
    >>> strings.code("a"), strings.code(""), strings.code("b"), strings.code("a"), strings.all()
    (1, 0, 2, 1, ['', 'a', 'b'])
    """

    def __init__(self):
        self._codes = {"": 0}

    def code(self, text: str) -> int:
        """The number of `text`, cut at `LONGEST_TEXT` characters."""
        if len(text) > LONGEST_TEXT:
            text = text[: LONGEST_TEXT - 1] + "…"
        return self._codes.setdefault(text, len(self._codes))

    def all(self) -> list[str]:
        """Every string, at the place that its number names."""
        return list(self._codes)


def buffer_fields() -> dict[str, Any]:
    """What the page knows of the fields of a buffer: their types, and [heading, field, doc] of those that it shows."""
    views = {
        view: [[each.headings[view], each.name, each.doc] for each in columns(Buffer, view)]
        for view in ("buffer_row", "detail")
    }
    return {"texts": TEXTS, "numbers": NUMBERS, **views}


def report_data(report: MemoryReport, *, most_buffers: int, most_moments: int) -> dict[str, Any]:
    """What the page's charts and table are drawn from.

    Args:
      report: its buffers come first, then those that only its timeline has.
      most_buffers: of either sort; the largest are kept.
      most_moments: of the timeline; the fullest moment of each stretch is kept, hence the peak too.
    """
    strings = Strings()
    at_peak = report.buffers[:most_buffers]
    seen = {_place(buffer) for buffer in at_peak}
    timeline = report.timeline
    others = [buffer for buffer in timeline.buffers if _place(buffer) not in seen] if timeline else []
    return {
        "name": report.name,
        "peak_bytes": report.peak_bytes,
        "capacity_bytes": report.capacity_bytes,
        "buffers": _buffers([*at_peak, *others[:most_buffers]], strings),
        "at_peak": len(at_peak),
        "left_out": {
            "count": len(report.buffers) - len(at_peak),
            "bytes": sum(buffer.size_bytes for buffer in report.buffers[most_buffers:]),
        },
        "lines": [[strings.code(line.file), line.line, strings.code(line.text)] for line in report.source_lines],
        "layers": [[strings.code(row.layer), row.kind, row.size_bytes] for row in report.by_layer],
        "timeline": timeline and _timeline(timeline, strings, most_moments),
        "strings": strings.all(),
    }


def _place(buffer: Buffer) -> tuple:
    return buffer.name, buffer.allocation, buffer.offset_bytes, buffer.start, buffer.end


def _buffers(buffers: Sequence[Buffer], strings: Strings) -> dict[str, Any]:
    """One list a field, and one number where all buffers have the same."""
    arrays: dict[str, Any] = {name: [strings.code(getattr(b, name)) for b in buffers] for name in TEXTS}
    arrays |= {name: [getattr(b, name) for b in buffers] for name in NUMBERS}
    for name, values in arrays.items():
        if values and min(values) == max(values):
            arrays[name] = values[0]
    return {"count": len(buffers), **arrays}


def _timeline(timeline: Timeline, strings: Strings, most: int) -> dict[str, Any]:
    moments = fullest(timeline.moments, most)
    kinds = in_order(kind for moment in moments for kind, _ in moment.by_kind)
    number = {kind: index for index, kind in enumerate(kinds)}
    positions, counts, changes = [], [], []
    alive: dict[str, int] = {}
    for moment in moments:
        now = dict(moment.by_kind)
        before = len(changes)
        for kind in kinds:
            change = now.get(kind, 0) - alive.get(kind, 0)
            if change:
                changes += (number[kind], change)
        positions.append(moment.position)
        counts.append((len(changes) - before) // 2)
        alive = now
    return {
        "length": timeline.length,
        "peak_position": timeline.peak_position,
        "kinds": kinds,
        "positions": positions,
        "counts": counts,
        "changes": changes,
        **{name: [strings.code(getattr(m, name)) for m in moments] for name in _OF_MOMENTS},
        "phases": [[run.phase, run.start, run.end + 1] for run in timeline.phases],
        "loops": [[strings.code(loop.name), loop.start, loop.end, loop.trips] for loop in timeline.loops],
    }


def fullest(moments: Sequence[Moment], most: int) -> Sequence[Moment]:
    """At most `most` moments: of each stretch of equally many, the one with most bytes alive, and the last of all.

    >>> from jaxmem.analysis import Moment
    >>> moments = [Moment(position=i, by_kind=(("batch", size),)) for i, size in enumerate([1, 9, 2, 3, 4, 0])]
    >>> [moment.position for moment in fullest(moments, 3)]
    [1, 4, 5]
    """
    if len(moments) <= most:
        return moments
    stretch = -(-len(moments) // (most - 1))
    stretches = [moments[start : start + stretch] for start in range(0, len(moments), stretch)]
    chosen = [max(part, key=lambda moment: moment.live_bytes) for part in stretches]
    return chosen if chosen[-1] is moments[-1] else [*chosen, moments[-1]]


def in_order(kinds: Iterable[str]) -> list[str]:
    """Each kind once, in the order of `KINDS`; unknown ones last, by name.

    >>> in_order(["code", "novel", "batch", "code"])
    ['batch', 'code', 'novel']
    """
    place = {kind: index for index, kind in enumerate(KINDS)}
    return sorted(set(kinds), key=lambda kind: (place.get(kind, len(KINDS)), kind))
