"""Live bytes over the schedule, each byte counted once and under one kind."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Span(NamedTuple):
    """A buffer's place in memory and time; `kind` indexes a list of kinds, the first wins where spans overlap."""

    offset: int
    size: int
    start: int
    end: int
    kind: int


class Sweep(NamedTuple):
    """Bytes of each kind from each position on.

    Args:
      positions: where something changes, ascending.
      bytes_by_kind: `(positions, kinds)` int64.
    """

    positions: np.ndarray
    bytes_by_kind: np.ndarray

    @property
    def peak(self) -> int:
        """Row with the most bytes."""
        return int(self.bytes_by_kind.sum(axis=1).argmax()) if len(self.positions) else 0

    @property
    def peak_bytes(self) -> int:
        """Of all kinds."""
        return int(self.bytes_by_kind[self.peak].sum())


def sweep(spans: Sequence[Span], kinds: int) -> Sweep:
    """The union of the spans' addresses at each position of the schedule.

    Values of a loop that is updated in place, or of an alias, share addresses: these are counted once. Memory is
    cut at every span's ends; each piece belongs to the first kind that has a span over it.
    """
    spans = [span for span in spans if span.size]
    if not spans:
        return Sweep(np.zeros(1, np.int64), np.zeros((1, kinds), np.int64))
    edges = np.unique(np.array([(s.offset, s.offset + s.size) for s in spans], np.int64))
    widths = np.diff(edges)
    first = np.searchsorted(edges, [s.offset for s in spans])
    last = np.searchsorted(edges, [s.offset + s.size for s in spans])
    alive = np.zeros((kinds + 1, len(widths)), np.int32)
    alive[kinds] = 1  # nobody's, below all kinds
    owner = np.full(len(widths), kinds)
    total = np.zeros(kinds + 1, np.int64)
    events: dict[int, list[tuple[int, int]]] = {}
    for number, span in enumerate(spans):
        events.setdefault(span.start, []).append((number, 1))
        events.setdefault(span.end + 1, []).append((number, -1))
    positions = sorted(events)
    rows = np.zeros((len(positions), kinds), np.int64)
    for row, position in enumerate(positions):
        for number, change in events[position]:
            pieces = slice(first[number], last[number])
            before = owner[pieces]
            alive[spans[number].kind, pieces] += change
            after = (alive[:, pieces] > 0).argmax(axis=0)
            changed = before != after
            if changed.any():
                moved = widths[pieces][changed]
                np.subtract.at(total, before[changed], moved)
                np.add.at(total, after[changed], moved)
                owner[pieces] = after
        rows[row] = total[:kinds]
    return Sweep(np.array(positions, np.int64), rows)
