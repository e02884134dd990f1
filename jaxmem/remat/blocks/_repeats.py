"""Repeated structure: stretches of equations that come again and again, one after the other."""

import collections

import jax.extend.core as jex
import numpy as np

from jaxmem._compat import effect_names
from jaxmem.remat.blocks._facts import BODIES, Facts, body_of

# Parameters that differ from layer to layer where the layers are the same: `w[0]`, `w[1]`, …
_PLACE = frozenset({"start_indices", "limit_indices", "name"})
# How far apart, counted in matmuls of the same kind, a repetition may be looked for; and how many distances are tried.
_MAX_ANCHORS, _MAX_PERIODS = 96, 96


class Tokens:
    """Numbers for equations: equal where primitive, parameters, shapes and dtypes are.

    Args:
      loose: compare primitives and ranks only, as for layers whose widths differ.
    """

    def __init__(self, facts: Facts, *, loose: bool = False):
        self._ids, self._bodies, self._loose = {}, {}, loose
        self.ids = np.array([self._number(self._token(eqn)) for eqn in facts.eqns], np.int64)

    def _number(self, token) -> int:
        return self._ids.setdefault(token, len(self._ids))

    def _token(self, eqn):
        if self._loose:
            ranks = tuple(len(getattr(v.aval, "shape", ())) for v in eqn.outvars)
            return eqn.primitive.name, ranks
        avals = tuple(self._aval(v) for v in (*eqn.invars, *eqn.outvars))
        if effect_names(eqn) and eqn.primitive.name not in BODIES:  # a print may name its layer
            return eqn.primitive.name, avals
        params = tuple((k, self._value(v)) for k, v in sorted(eqn.params.items()) if k not in _PLACE)
        return eqn.primitive.name, avals, params

    def _aval(self, atom):
        aval = atom.aval
        return getattr(aval, "shape", None), str(getattr(aval, "dtype", ""))

    def _value(self, value):
        if isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr)):
            jaxpr, _ = body_of(value)
            if id(jaxpr) not in self._bodies:  # jit gives the same jaxpr to every call of one function
                inner = tuple(self._number(self._token(eqn)) for eqn in jaxpr.eqns)
                self._bodies[id(jaxpr)] = self._number(("jaxpr", inner))
            return self._bodies[id(jaxpr)]
        if isinstance(value, (tuple, list)):
            return tuple(self._value(v) for v in value)
        if value is None or isinstance(value, (bool, int, float, str, np.dtype)):
            return value
        if callable(value):  # rules of custom derivatives: a new object for every call
            return getattr(value, "__name__", type(value).__name__)
        try:
            return type(value).__name__, hash(value)
        except TypeError:
            return type(value).__name__


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
