"""Bytes covered by intervals that may overlap, at one time and over a schedule."""

from collections.abc import Iterable


def union_bytes(intervals: Iterable[tuple[int, int]]) -> int:
    """Bytes covered by (offset, size) pairs; bytes covered twice count once.

    >>> union_bytes([(0, 4), (2, 4), (10, 1)])
    7
    """
    total, reached = 0, 0
    for offset, size in sorted(intervals):
        total += max(0, offset + size - max(reached, offset))
        reached = max(reached, offset + size)
    return total


def live_curve(rectangles: list[tuple[int, int, int, int]], length: int) -> list[int]:
    """Bytes covered at each of `length` positions.

    Args:
      rectangles: (start, end, offset, size): `size` bytes from `offset` on, alive from `start` to `end`, both included.
        Those that start below 0 are left out.
      length: number of positions.

    In time O(n log n): a tree over the offsets counts what covers each piece while the positions are swept.

    >>> live_curve([(0, 1, 0, 4), (1, 2, 2, 4)], 4)
    [4, 6, 4, 0]
    """
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for start, end, offset, size in rectangles:
        if start >= 0 and size > 0:
            spans.setdefault((offset, offset + size), []).append((start, end))
    edges = sorted({edge for span in spans for edge in span})
    place = {edge: number for number, edge in enumerate(edges)}
    changes: list[list[tuple[int, int, int]]] = [[] for _ in range(length + 1)]
    for (low, high), ranges in spans.items():
        for start, end in _merge(ranges):
            changes[min(start, length)].append((place[low], place[high], 1))
            changes[min(end + 1, length)].append((place[low], place[high], -1))
    tree = _CoverTree(edges)
    curve = []
    for change in changes[:length]:
        for low, high, delta in change:
            tree.add(low, high, delta)
        curve.append(tree.covered)
    return curve


def _merge(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Inclusive ranges without overlaps: values that follow one another in one place become one."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


class _CoverTree:
    """Total length of the pieces between `edges` that at least one added span covers."""

    def __init__(self, edges: list[int]):
        self._edges = edges
        self._size = 1
        while self._size < max(1, len(edges) - 1):
            self._size *= 2
        self._count = [0] * (2 * self._size)
        self._length = [0] * (2 * self._size)

    @property
    def covered(self) -> int:
        return self._length[1]

    def add(self, low: int, high: int, delta: int) -> None:
        """Covers the pieces low..high-1 once more (`delta` 1), or once less (-1)."""
        self._add(1, 0, self._size, low, high, delta)

    def _add(self, node: int, left: int, right: int, low: int, high: int, delta: int) -> None:
        if low <= left and right <= high:
            self._count[node] += delta
        else:
            middle = (left + right) // 2
            if low < middle:
                self._add(2 * node, left, middle, low, high, delta)
            if high > middle:
                self._add(2 * node + 1, middle, right, low, high, delta)
        if self._count[node]:
            last = len(self._edges) - 1
            self._length[node] = self._edges[min(right, last)] - self._edges[min(left, last)]
        elif right - left == 1:
            self._length[node] = 0
        else:
            self._length[node] = self._length[2 * node] + self._length[2 * node + 1]
