"""What repeats: modules, by the scopes of their equations, and like equations, one stretch after the other."""

import collections
import re
from typing import NamedTuple

import numpy as np

from jaxmem.jaxprs import Facts, Tokens

# How far apart, counted in matmuls of the same kind, a repetition may be looked for; and how many distances are tried.
_MAX_ANCHORS, _MAX_PERIODS = 96, 96


class Stretch(NamedTuple):
    """The equations `[start, stop)`, such as a call of a module: those under one scope."""

    name: str
    start: int
    stop: int


def stretches_at(paths, depth: int, start: int, stop: int) -> list[Stretch]:
    """Maximal runs of equations of `[start, stop)` that share the scope at `depth`."""
    calls, i = [], start
    while i < stop:
        name, first = paths[i][depth] if len(paths[i]) > depth else None, i
        while i < stop and (paths[i][depth] if len(paths[i]) > depth else None) == name:
            i += 1
        if name is not None:
            calls.append(Stretch(name, first, i))
    return calls


def repeated_modules(calls: list[Stretch]) -> list[list[Stretch]]:
    """Calls of modules that differ only in their numbers (`Block_0`, `Block_1`; `stage1_block0`), by name."""
    groups = collections.defaultdict(list)
    for call in calls:
        groups[re.sub(r"\d+", "#", call.name)].append(call)
    return [group for group in groups.values() if len({call.name for call in group}) > 1]


def find_repeat(facts: Facts, tokens: Tokens, start: int, stop: int) -> list[tuple[int, int]]:
    """The units of the repetition with the most heavy work in `[start, stop)`, as intervals; [] if there is none.

    Among the places where the repetition may be cut, the one is taken that keeps the fewest bytes: what
    crosses the cuts, plus what the equations left over at both ends would keep. So a unit ends where the
    residual stream alone goes on, as a person would mark it.
    """
    ids = tokens.ids[start:stop]
    best, best_score = None, (1, 0)  # one heavy equation, repeated or not, is no repetition
    for period in _periods(facts, ids, start, stop):
        same = ids[:-period] == ids[period:]
        for first, last in _runs(same):
            if last - first < period:
                continue
            lo, hi = start + first, start + last + period
            score = (facts.num_heavy(lo, hi), -period)
            if score > best_score:
                units = _best_cut(facts, lo, hi, period)
                if _worth(facts, *units[0]):
                    best, best_score = units, score
    return best or []


def _periods(facts: Facts, ids, start: int, stop: int) -> list[int]:
    """Distances between like heavy equations, the most frequent first."""
    places = collections.defaultdict(list)
    for i in range(start, stop):
        if facts.heavy[i]:
            places[ids[i - start]].append(i)
    counts = collections.Counter()
    for found in places.values():
        found = np.array(found)
        for ahead in range(1, min(len(found), _MAX_ANCHORS)):
            distances, times = np.unique(found[ahead:] - found[:-ahead], return_counts=True)
            for distance, count in zip(distances.tolist(), times.tolist(), strict=True):
                counts[distance] += count
    return [distance for distance, _ in counts.most_common(_MAX_PERIODS) if distance < stop - start]


def _runs(same: np.ndarray) -> list[tuple[int, int]]:
    """Maximal intervals of True."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], same, [False]]).astype(np.int8)))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def _best_cut(facts: Facts, lo: int, hi: int, period: int) -> list[tuple[int, int]]:
    crossing = facts.crossing_bytes(period)

    def kept(shift: int) -> int:
        cuts = range(lo + shift, hi - period + 1, period)
        left_over = facts.kept_before[lo + shift] - facts.kept_before[lo]
        left_over += facts.kept_before[hi] - facts.kept_before[cuts[-1] + period]
        return sum(crossing[cut] for cut in cuts) + left_over

    shifts = range(min(period, hi - lo - 2 * period + 1))  # at least two units
    shift = min(shifts, key=kept)
    return [(cut, cut + period) for cut in range(lo + shift, hi - period + 1, period)]


def _worth(facts: Facts, start: int, stop: int) -> bool:
    return facts.num_heavy(start, stop) > 0 and facts.inside_bytes(range(start, stop)) > 0
