"""The choice as a mixed integer program: keep, offload or recompute every value of every distinct block.

    minimise    sum_e run_e r_e + sum_v keep_v s_v + offload_v o_v        each block times the number of its runs
    subject to  s_v + o_v + r_maker(v) >= 1                               for every residual v
                s_v + o_v + r_maker(v) >= r_e                             for every value v that equation e reads
                sum_v bytes_v s_v + w <= budget                           kept by all blocks, and a working set
                w >= sum over residuals of held_v (1 - s_v)               for every block
                w >= bytes kept outside of blocks, and all that the last block's pull-back reads

A block's working set is what its pull-back reads and it has not kept, broadcasts and other views aside. What is kept
outside of blocks and by the last one, mostly a loss's logits, is gone when the backward pass comes to the others, so
it is no part of the sum. All that the last block's pull-back reads is there at once, kept or recomputed. So that block
keeps everything: it stays as it is written, and the compiler may fuse what a rule round it would have to store. Only a
bound of kept bytes alone leaves the solver a choice; under a compiled peak the search tries others. The closure
constraints are those of a minimum cut, so the relaxation is nearly integral and the solver is quick. After Checkmate
(https://arxiv.org/abs/1910.02653), whose program has a time index, and is for whole graphs instead of blocks.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxmem._stdout import stdout_to_stderr
from jaxmem.remat.auto._candidates import Candidates, Choice, Weights

_SECONDS = 10.0  # for one program: one that takes longer gets what was found by then
_GAP = 1e-3  # of the price, at which HiGHS stops
# Of the budget: choices that differ in less compile to nearly the same program. With 0 one budget of 30 is 14 times as
# dear.
_LARGE = 0.002
# Of the price of recomputing a whole block: choices that differ in such an equation are different. With 0 there are
# 13 % more compiles, and 2 budgets of 45 are cheaper.
_HEAVY = 0.01


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """Blocks that are alike.

    Args:
      candidates: of one of them.
      members: how many there are in the program.
      times: how often each runs: the length of the scans round it.
      last: its backward pass is the first, and what it keeps is gone when that comes to the others.
    """

    candidates: Candidates
    members: int = 1
    times: int = 1
    last: bool = False

    @property
    def runs(self) -> int:
        """How often the block's values are kept."""
        return self.members * self.times


@dataclasses.dataclass(frozen=True, kw_only=True)
class Solved:
    """Choices by group, with what they cost.

    Args:
      choices: one per group.
      price: of the objective.
      bound: no choice within the budget has a lower price.
    """

    choices: tuple[Choice, ...]
    price: float
    bound: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What the choice must stay within.

    Args:
      budget_bytes: for what blocks keep and, with `working`, the largest working set.
      working: whether working sets count.
      outside_bytes: kept outside of blocks.
      offload: whether values may wait in host memory.
      end: what the last block keeps where `working`: "everything", its "products" or its "inputs".
      byte_price: what a kept byte costs, for a choice without a budget.
      without: choices, one per group, that are excluded; others must keep at least one large value more or less.
      unlike: the same, but others must recompute at least one heavy equation more or less.
    """

    budget_bytes: float
    working: bool = True
    outside_bytes: float = 0.0
    offload: bool = False
    end: str = "everything"
    byte_price: float = 0.0
    without: tuple[tuple[Choice, ...], ...] = ()
    unlike: tuple[tuple[Choice, ...], ...] = ()


def solve(groups: Sequence[Group], limits: Limits, objective: str) -> Solved | None:
    """The cheapest choice, the same for all blocks of a group; None where none stays within the budget."""
    if not groups:
        return Solved(choices=(), price=0.0, bound=0.0)
    program = _Program(groups, limits, objective)
    found = program.minimum()
    if found is None:
        return None
    choices = program.choices(found.x)
    price = sum(g.runs * g.candidates.price(choice, objective) for g, choice in zip(groups, choices, strict=True))
    return Solved(choices=choices, price=price, bound=min(price, found.bound))


def relaxed_price(groups: Sequence[Group], limits: Limits, objective: str) -> float:
    """The price of the linear relaxation, a lower bound even where like blocks take different choices."""
    program = _Program(groups, limits, objective)
    program.integral[:] = 0
    found = program.minimum()
    return 0.0 if found is None else found.cost


def heavy(weights: Weights) -> np.ndarray:
    """Per equation, whether a choice that recomputes it counts as different from one that does not."""
    return weights.run > _HEAVY * weights.run.sum()


class Rows(NamedTuple):
    """Constraints `lower <= A x`, as the non-zeros of A.

    Args:
      rows, columns, values: of the non-zeros.
      lower: per row.
    """

    rows: Sequence[int]
    columns: Sequence[int]
    values: Sequence[float]
    lower: Sequence[float]


class Minimum(NamedTuple):
    """The best solution found: its variables, its cost, and what no solution is cheaper than."""

    x: np.ndarray
    cost: float
    bound: float


class _Program:
    """Variables: w, then for each group the values kept, those offloaded, and the equations that run again."""

    def __init__(self, groups, limits: Limits, objective: str):
        self.groups, self.limits = groups, limits
        weights = [g.candidates.weights(objective) for g in groups]
        fates = 2 if limits.offload else 1
        sizes = [fates * len(g.candidates.values) + len(g.candidates.equations) for g in groups]
        self.starts = 1 + np.concatenate([[0], np.cumsum(sizes)[:-1]]).astype(int)
        self.runs = [s + fates * len(g.candidates.values) for g, s in zip(groups, self.starts, strict=True)]
        self.count = 1 + sum(sizes)
        self.cost, self.upper, self.floor = np.zeros(self.count), np.ones(self.count), np.zeros(self.count)
        self.integral = np.zeros(self.count)
        self.unit = max(1.0, float(limits.budget_bytes))  # of bytes, so that numbers are near 1
        self.upper[0], self.floor[0] = np.inf, limits.outside_bytes / self.unit
        self.rows, self.columns, self.data, self.lower = [], [], [], []
        budget_row = [(0, 1.0)] if limits.working else []
        for group, start, runs, weight in zip(groups, self.starts, self.runs, weights, strict=True):
            c, n = group.candidates, len(group.candidates.values)
            self.integral[start:runs] = 1
            self.cost[start : start + n] = group.runs * (weight.keep + limits.byte_price * c.value_bytes)
            if limits.offload:
                self.cost[start + n : runs] = group.runs * weight.offload
            self.cost[runs : runs + len(c.equations)] = group.runs * weight.run
            self.upper[runs : runs + len(c.equations)][c.fixed] = 0
            for v in np.flatnonzero(c.is_residual):
                self._require([*self._there(start, n, runs, c, v)], 1.0)
            for e, reads in enumerate(c.reads):
                for v in reads:
                    self._require([*self._there(start, n, runs, c, v), (runs + e, -1.0)], 0.0)
            kept = [(start + v, group.runs * c.value_bytes[v] / self.unit) for v in range(n)]
            if limits.working and group.last:
                end = c.ending(limits.end)
                self.upper[start:runs] = self.floor[start:runs] = 0
                self.upper[start + np.array(end.kept, int)] = self.floor[start + np.array(end.kept, int)] = 1
                self.floor[0] = max(self.floor[0], (limits.outside_bytes + c.end_bytes(end)) / self.unit)
                continue
            budget_row += kept
            if limits.working:
                residuals = np.flatnonzero(c.is_residual)
                row = [(0, 1.0), *[(start + v, c.held_bytes[v] / self.unit) for v in residuals]]
                self._require(row, float(c.held_bytes[residuals].sum()) / self.unit)
        self._require([(i, -a) for i, a in budget_row], -limits.budget_bytes / self.unit)
        for choices in limits.without:
            self._forbid(choices)
        if limits.unlike:
            self._run_only_what_is_read()
        for choices in limits.unlike:
            self._forbid_runs(choices, weights)

    def _there(self, start, n, runs, c, v):
        yield start + v, 1.0
        if self.limits.offload:
            yield start + n + v, 1.0
        if c.maker[v] >= 0:
            yield runs + c.maker[v], 1.0

    def _forbid(self, choices: Sequence[Choice]) -> None:
        row, kept = [], 0
        for group, start, choice in zip(self.groups, self.starts, choices, strict=True):
            c = group.candidates
            for v in np.flatnonzero(group.runs * c.value_bytes >= _LARGE * self.limits.budget_bytes):
                kept += v in choice.kept
                row.append((start + v, -1.0 if v in choice.kept else 1.0))
        self._require(row, 1.0 - kept)

    def _forbid_runs(self, choices: Sequence[Choice], weights: Sequence[Weights]) -> None:
        row, again = [], 0
        for group, start, choice, weight in zip(self.groups, self.runs, choices, weights, strict=True):
            runs = group.candidates.recomputed(choice)
            for e in np.flatnonzero(heavy(weight)):
                again += runs[e]
                row.append((start + e, -1.0 if runs[e] else 1.0))
        self._require(row, 1.0 - again)

    def _run_only_what_is_read(self) -> None:
        """Only what is read is recomputed, also where more would make a choice differ from an excluded one."""
        for group, start, runs in zip(self.groups, self.starts, self.runs, strict=True):
            c = group.candidates
            readers = [[e for e, reads in enumerate(c.reads) if v in reads] for v in range(len(c.values))]
            for e in range(len(c.equations)):
                made = np.flatnonzero(c.maker == e)
                residuals = made[c.is_residual[made]]
                read = {reader for v in made for reader in readers[v]}
                # An output is neither kept nor offloaded, and is a residual or read by a recomputed equation.
                self._require([(runs + e, -1.0), *self._known(start, c, made)], -float(len(made)))
                row = [*self._known(start, c, residuals), *[(runs + reader, 1.0) for reader in read]]
                self._require([(runs + e, -1.0), *row], -float(len(residuals)))

    def _known(self, start: int, c: Candidates, values) -> list[tuple[int, float]]:
        """The columns of values kept or offloaded, each to be subtracted."""
        columns = [start + v for v in values]
        if self.limits.offload:
            columns += [start + len(c.values) + v for v in values]
        return [(column, -1.0) for column in columns]

    def _require(self, row, lower: float) -> None:
        number = len(self.lower)
        self.lower.append(lower)
        for column, value in row:
            self.rows.append(number)
            self.columns.append(column)
            self.data.append(value)

    def minimum(self) -> Minimum | None:
        rows = Rows(self.rows, self.columns, self.data, self.lower)
        return minimise(self.cost, rows, low=self.floor, high=self.upper, integral=self.integral)

    def choices(self, x) -> tuple[Choice, ...]:
        """What the solution says, without values that are kept although nothing reads them."""
        found = []
        for group, start in zip(self.groups, self.starts, strict=True):
            n = len(group.candidates.values)
            kept = set(np.flatnonzero(x[start : start + n] > 0.5).tolist())
            away = set()
            if self.limits.offload:
                away = set(np.flatnonzero(x[start + n : start + 2 * n] > 0.5).tolist()) - kept
            read = group.candidates.read(Choice(tuple(kept), tuple(away)))
            found.append(Choice(*(tuple(v for v in sorted(each) if read[v]) for each in (kept, away))))
        return tuple(found)


def minimise(cost, rows: Rows, *, low, high, integral) -> Minimum | None:
    """The cheapest `x` with `low <= x <= high`, integers where `integral`; None where none was found in time."""
    import scipy.optimize  # takes half a second, which only a budget needs
    import scipy.sparse

    scale = max(float(np.max(np.abs(cost), initial=0.0)), 1e-300)
    shape = (len(rows.lower), len(cost))
    matrix = scipy.sparse.csc_matrix((rows.values, (rows.rows, rows.columns)), shape=shape)
    with stdout_to_stderr():  # HiGHS at times prints a line
        found = scipy.optimize.milp(
            np.asarray(cost) / scale,
            constraints=scipy.optimize.LinearConstraint(matrix, np.asarray(rows.lower), np.inf),  # pyright: ignore
            integrality=np.asarray(integral),
            bounds=scipy.optimize.Bounds(np.asarray(low), np.asarray(high)),  # pyright: ignore
            options={"mip_rel_gap": _GAP, "time_limit": _SECONDS},
        )
    if found.x is None:
        return None
    bound = found.fun if found.mip_dual_bound is None else found.mip_dual_bound
    return Minimum(found.x, float(found.fun) * scale, float(bound) * scale)
