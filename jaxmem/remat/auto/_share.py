"""`within_share`: choices within a share of what the plain function keeps."""

from jaxmem._units import format_apart, format_bytes
from jaxmem.errors import BudgetInfeasible
from jaxmem.remat.auto._assign import Assignment, smallest, within
from jaxmem.remat.auto._nested import nested
from jaxmem.remat.auto._problem import Problem
from jaxmem.remat.auto._solution import in_the_way


def within_share(problem: Problem, share: float, *, objective: str = "seconds", offload: bool = False) -> Assignment:
    """The cheapest choices that keep at most a share of the plain function's residuals; for 0, the least there is.

    Raises:
      BudgetInfeasible: the inputs of blocks, and what is kept outside of them, are more than the share.
    """
    room = share * problem.plain_bytes
    found = within(problem, room, objective=objective, offload=offload, working=False)
    if found is not None:
        return found
    least, segments = smallest(problem, objective=objective), nested(problem, objective=objective)
    if share == 0 or not problem.plain_bytes or least.kept_bytes <= room:  # or the solver ran out of time
        return least
    if segments is not None and segments.kept_bytes <= room:
        return segments
    least = min((each for each in (least, segments) if each is not None), key=lambda each: each.kept_bytes)
    least_bytes = least.kept_bytes
    wanted, got = format_apart(int(room), least_bytes)
    raise BudgetInfeasible(
        wanted=f"at most {share:g} of the residuals, {wanted} of {format_bytes(problem.plain_bytes)}",
        got=f"at least {least_bytes / problem.plain_bytes:.3g}, {got}: what blocks are given and "
        f"what is kept outside of them; the largest are {in_the_way(problem, least)}",
        do="Allow a larger share.",
    )
