"""Live ranges of all values of a scheduled module, as XLA counts them."""

import itertools

from jaxmem.analysis.assignment._flow import Flow
from jaxmem.analysis.hlo._module import Index


def live_ranges(flow: Flow) -> dict[tuple[str, Index], tuple[int, int]]:
    """First and last position, both included, per (instruction name, index) that defines a value.

    Values that must be the same bytes never overlap: each ends where the next one begins.
    """
    ranges = {number: (flow.start[number], flow.end[number]) for number in range(len(flow.names))}
    groups: dict[int, list[int]] = {}
    for number in ranges:
        if number not in flow.replaced:
            groups.setdefault(flow.buffer(number), []).append(number)
    result = {}
    last = len(flow.schedule) - 1
    for members in groups.values():
        members.sort(key=lambda number: ranges[number])
        for one, other in itertools.pairwise(members):
            (start, end), (next_start, next_end) = ranges[one], ranges[other]
            ranges[other] = (next_start, max(end, next_end))
            ranges[one] = (start, min(end, next_start))
        for number in members:
            start, end = ranges[number]
            result[flow.names[number], flow.indices[number]] = (start, max(start, min(end, last)))
    return result
