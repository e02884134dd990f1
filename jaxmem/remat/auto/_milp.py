"""`minimise`: a mixed integer program, solved by HiGHS (https://highs.dev) through scipy."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jaxmem._stdout import stdout_to_stderr

GAP = 1e-3


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


def minimise(cost, rows: Rows, *, low, high, integral, seconds: float, gap: float = GAP) -> Minimum | None:
    """The cheapest `x` with `low <= x <= high`, integers where `integral`; None where none was found in time."""
    import scipy.optimize  # half a second that only a budget is worth
    import scipy.sparse

    scale = max(float(np.max(np.abs(cost), initial=0.0)), 1e-300)
    shape = (len(rows.lower), len(cost))
    matrix = scipy.sparse.csc_matrix((rows.values, (rows.rows, rows.columns)), shape=shape)
    with stdout_to_stderr():  # HiGHS at times prints a line that nobody asked for
        found = scipy.optimize.milp(
            np.asarray(cost) / scale,
            constraints=scipy.optimize.LinearConstraint(matrix, np.asarray(rows.lower), np.inf),  # pyright: ignore
            integrality=np.asarray(integral),
            bounds=scipy.optimize.Bounds(np.asarray(low), np.asarray(high)),  # pyright: ignore
            options={"mip_rel_gap": gap, "time_limit": seconds},
        )
    if found.x is None:
        return None
    bound = found.fun if found.mip_dual_bound is None else found.mip_dual_bound
    return Minimum(found.x, float(found.fun) * scale, float(bound) * scale)
