"""Which values to keep into each stage, at the least recomputation under a peak: a mixed-integer program for HiGHS.

Columns, for stage s and value i of the forward pass: keep[s, i], i is there when s begins; again[s, i], s makes it.
keep is 0 or 1; again then follows by itself, so it may be continuous.

* what a stage makes again has its inputs: again[s, i] ≤ keep[s, j] + again[s, j] for each input j of i;
* what a stage leaves or its gradients read is there: keep[s+1, i] or 1 ≤ keep[s, i] + again[s, i];
* at each operation, what is alive is at most the peak, plus over[s] where a price for that is set. While the stage
  makes values again, one is taken to be alive up to the last layer that reads it, and beyond when it is left or read
  by the gradients: linear, and never too little.

The peak is of the same value for every batch, since all bytes grow with it: no column for the batch is needed.
"""

import dataclasses
import time
from collections.abc import Callable

import numpy as np
from scipy import optimize, sparse

from benchmarks._checkmate_graph import Graph
from benchmarks._checkmate_stages import Stage, gradients_alive, lay_out

# Column of a term that is one whatever is chosen.
ALWAYS = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answer:
    """Attributes:
    kept: (stage, value) for what is there when a stage begins; None when none was found in time.
    recomputed: by the program, as a share of the forward pass's FLOPs; infinite without `kept`.
    cost: the same, plus the price of what is over the peak; equal to it when nothing is.
    least: no choice of kept values recomputes less (share); infinite when none fits the peak.
    seconds: that HiGHS took.
    """

    kept: frozenset[tuple[int, int]] | None
    recomputed: float
    cost: float
    least: float
    seconds: float


def _nothing(least: float, seconds: float) -> Answer:
    return Answer(kept=None, recomputed=np.inf, cost=np.inf, least=least, seconds=seconds)


class Program:
    """The program of one graph and its stages, ready to be solved under several peaks."""

    def __init__(self, graph: Graph, stages: tuple[Stage, ...]):
        self.graph, self.stages = graph, stages
        self.sizes = np.array(graph.bytes) / max(graph.bytes)
        self.keep = {(s, i): 0 for s, stage in enumerate(stages) for i in range(stage.reach + 1)}
        self.keep = {key: column for column, key in enumerate(self.keep)}
        self.again = {key: len(self.keep) + column for key, column in self.keep.items()}
        self.rows: list[dict[int, float]] = []
        self.peaks: list[dict[int, float]] = []
        self.over = [2 * len(self.keep) + s for s in range(len(stages) + 1)]  # of each stage, and of the forward pass
        self.readers = [[u for u in graph.users[i] if u < graph.forward] for i in range(graph.forward)]
        self._forward_pass()
        for s in range(len(stages)):
            self._stage(s)
        self.columns = 2 * len(self.keep) + len(self.over)
        self.matrices = [_matrix(rows, self.columns) for rows in (self.rows, self.peaks)]

    def _left(self, s: int, i: int) -> int | None:
        """The column that tells whether value i is alive once stage s has made what it makes."""
        if i in self.stages[s].needed:
            return ALWAYS
        return self.keep.get((s + 1, i))

    def _forward_pass(self) -> None:
        for op in range(self.graph.forward):
            row = _Row(self.sizes, self.over[-1])
            for i in range(op + 1):
                busy = i == op or max(self.readers[i], default=op) >= op
                row.add(i, ALWAYS if busy else self.keep.get((0, i)))
            self.peaks.append(row.terms)

    def _stage(self, s: int) -> None:
        stage, graph = self.stages[s], self.graph
        others = sum(self.sizes[i] for i in gradients_alive(graph, stage.gradients[0]) - {stage.gradients[0]})
        values = range(stage.reach + 1)
        last = [max((u for u in self.readers[i] if u <= stage.reach), default=i) for i in values]
        for op in values:
            keep, again, left = self.keep[s, op], self.again[s, op], self._left(s, op)
            self.rows += [{again: 1, self.keep[s, j]: -1, self.again[s, j]: -1} for j in graph.inputs[op]]
            if left is not None:
                self.rows.append({keep: -1, again: -1, left: 1})
            row = _Row(self.sizes, self.over[s], others)
            for i in values:
                if i > op:
                    row.add(i, self.keep[s, i])
                elif last[i] >= op:
                    row.add(i, self.keep[s, i])
                    row.add(i, self.again[s, i])
                else:
                    row.add(i, self._left(s, i))
            self.peaks.append(row.terms)
        for op in stage.gradients:
            row = _Row(self.sizes, self.over[s], sum(self.sizes[i] for i in gradients_alive(graph, op)))
            for i in values:
                still = any(op <= user <= stage.gradients[-1] for user in graph.users[i])
                row.add(i, ALWAYS if still else self.keep.get((s + 1, i)))
            self.peaks.append(row.terms)

    def solve(
        self,
        peak_bytes: float,
        *,
        seconds: float,
        stop_at: float = 0.0,
        relaxed: bool = False,
        near: frozenset[tuple[int, int]] | None = None,
        free: Callable[[int, int], bool] | None = None,
        over_price: float | None = None,
        below: float | None = None,
    ) -> Answer:
        """The least recomputation under a peak.

        Args:
            peak_bytes: for a batch of one.
            seconds: limit.
            stop_at: a share of recomputation that is low enough to stop (by the gap to the relaxed program).
            relaxed: let keep be a fraction: for `least` alone, in a second or so.
            near, free: what is kept stays as in `near`, but for each (stage, value) that is `free`.
            over_price: lets stages pass the peak: a stage that passes it by all of it costs so many forward passes.
            below: nothing is wanted whose cost is not below this.
        """
        started = time.perf_counter()
        gap = 0.0
        if stop_at and not relaxed:
            least = self.solve(peak_bytes, seconds=seconds, relaxed=True).least
            if least > stop_at:
                return _nothing(least, time.perf_counter() - started)
            gap = 1 - 0.95 * least / stop_at
        room = peak_bytes / max(self.graph.bytes)
        cost = np.zeros(self.columns)
        for (_, i), column in self.again.items():
            cost[column] = self.graph.flops[i] / self.graph.forward_flops
        cost[self.over] = (over_price or 0.0) / room
        integrality = np.zeros(self.columns)
        integrality[: len(self.keep)] = 0 if relaxed else 1
        low, high = np.zeros(self.columns), np.ones(self.columns)
        high[self.over] = 0 if over_price is None else np.inf
        if near is not None and free is not None:
            for key, column in self.keep.items():
                if not free(*key):
                    low[column] = high[column] = key in near
        constraints = [
            optimize.LinearConstraint(matrix, -np.inf, limit - always)
            for (matrix, always), limit in zip(self.matrices, (0.0, room), strict=True)
        ]
        if below is not None:
            constraints.append(optimize.LinearConstraint(cost, -np.inf, below))
        found = optimize.milp(
            cost,
            constraints=constraints,
            integrality=integrality,
            bounds=optimize.Bounds(low, high),
            options={"time_limit": seconds, "mip_rel_gap": gap},
        )
        took = time.perf_counter() - started
        if found.status == 2:
            return _nothing(np.inf, took)
        if relaxed:
            return _nothing(found.fun if found.status == 0 else 0.0, took)
        least = found.mip_dual_bound or 0.0
        if found.x is None:
            return _nothing(least, took)
        kept = frozenset(key for key, column in self.keep.items() if found.x[column] > 0.5)
        # Not found.fun: HiGHS takes 0.999999 for 1, and a choice may leave values that nothing reads.
        flops = self.graph.flops
        spent = sum(flops[op] for op in lay_out(self.graph, self.stages, kept)) - sum(flops)
        recomputed = spent / self.graph.forward_flops
        over = float(cost[self.over] @ found.x[self.over])
        return Answer(kept=kept, recomputed=recomputed, cost=recomputed + over, least=least, seconds=took)


class _Row:
    """Bytes alive at one operation: column → size."""

    def __init__(self, sizes: np.ndarray, over: int, always: float = 0.0):
        self.sizes = sizes
        self.terms: dict[int, float] = {ALWAYS: always, over: -1.0}

    def add(self, value: int, column: int | None) -> None:
        if column is not None:
            self.terms[column] = self.terms.get(column, 0.0) + self.sizes[value]


def _matrix(rows: list[dict[int, float]], columns: int) -> tuple[sparse.csr_array, np.ndarray]:
    """The rows' coefficients, and what they sum to whatever is chosen."""
    entries = [(r, column, value) for r, row in enumerate(rows) for column, value in row.items() if column != ALWAYS]
    at, columns_at, values = zip(*entries, strict=True)
    matrix = sparse.csr_array((values, (at, columns_at)), shape=(len(rows), columns))
    return matrix, np.array([row.get(ALWAYS, 0.0) for row in rows])
