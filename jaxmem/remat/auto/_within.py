"""`within`: the cheapest choices for all blocks of a function within one budget."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxmem._units import format_apart, format_bytes
from jaxmem.errors import BudgetInfeasible
from jaxmem.remat.auto._assignment import Assignment, assignment_of, nested, plain, repriced, smallest
from jaxmem.remat.auto._candidates import Choice
from jaxmem.remat.auto._mixtures import mixtures
from jaxmem.remat.auto._problem import Problem
from jaxmem.remat.auto._solution import in_the_way
from jaxmem.remat.auto._solve import Limits, heavy, relaxed_price, solve

_TOLERANCE = 1e-5  # of a budget, to which the solver meets it: a millionth was seen


def assign(
    problem: Problem,
    budget_bytes: float,
    *,
    objective: str = "seconds",
    working: bool = True,
    offload: bool = False,
    end: str = "everything",
    without: Sequence[Assignment] = (),
    unlike: Sequence[Assignment] = (),
) -> Assignment | None:
    """The cheapest choices within a budget; None where there are none.

    Args:
      problem: the blocks.
      budget_bytes: for what is kept, outside of blocks too, and, with `working`, the largest working set.
      objective: "seconds" or "flops".
      offload: whether values may wait in host memory.
      end: as of `Limits`.
      without: excluded; counts where all members of a group have the same choice.
      unlike: excluded likewise, with all that recompute the same heavy equations.
    """
    outside = problem.base_bytes
    limits = Limits(
        budget_bytes=budget_bytes if working else budget_bytes - outside,
        working=working,
        outside_bytes=outside,
        offload=offload,
        end=end,
        without=tuple(filter(None, (_by_group(problem, each) for each in without))),
        unlike=tuple(filter(None, (_by_group(problem, each) for each in unlike))),
    )
    solved = solve(problem.groups, limits, objective)
    if solved is None:
        return None
    members = [{choice: group.members} for group, choice in zip(problem.groups, solved.choices, strict=True)]
    price, bound = solved.price, solved.bound
    if any(group.members > 1 for group in problem.groups):
        bound = min(bound, relaxed_price(problem.groups, limits, objective))
        # Only choices for whole groups are excluded.
        free = dataclasses.replace(limits, without=(), unlike=())
        for mixed in mixtures(problem.groups, free, objective, solved.choices):
            if mixed.price < price and not _is_excluded(problem, mixed.members, limits, objective):
                members, price = mixed.members, mixed.price
    if without or unlike or end != "everything":  # not all excluded choices were tried, so the bound is of all choices
        free = assign(problem, budget_bytes, objective=objective, working=working, offload=offload)
        bound = 0.0 if free is None else free.bound
    found = assignment_of(problem, members, price, bound)
    over = (found.total_bytes if working else found.kept_bytes) - budget_bytes
    if not 0 < over <= _TOLERANCE * budget_bytes:
        return found
    options = {"objective": objective, "working": working, "offload": offload, "end": end}
    less = assign(problem, budget_bytes - 2 * over, **options, without=without, unlike=unlike)
    return less and dataclasses.replace(less, bound=min(bound, less.bound))


def _is_excluded(problem: Problem, members: Sequence[dict[Choice, int]], limits: Limits, objective: str) -> bool:
    if any(len(each) > 1 for each in members):
        return False
    choices = tuple(choice for (choice,) in members)
    return choices in limits.without or any(_run_alike(problem, choices, other, objective) for other in limits.unlike)


def _run_alike(problem: Problem, some: Sequence[Choice], others: Sequence[Choice], objective: str) -> bool:
    """Whether two choices, one per group, recompute the same heavy equations."""
    for group, a, b in zip(problem.groups, some, others, strict=True):
        c = group.candidates
        if (heavy(c.weights(objective)) & (c.recomputed(a) ^ c.recomputed(b))).any():
            return False
    return True


def _by_group(problem: Problem, assignment: Assignment) -> tuple[Choice, ...] | None:
    found = [
        {assignment.choices[n] for n, at in problem.group_of.items() if at == i} for i in range(len(problem.groups))
    ]
    return tuple(choice for (choice,) in found) if all(len(each) == 1 for each in found) else None


def within(
    problem: Problem,
    size: float,
    *,
    objective: str = "seconds",
    offload: bool = False,
    working: bool = True,
    end: str = "everything",
) -> Assignment | None:
    """As `assign`, but everything is kept where that stays within the budget and nothing is cheaper."""
    everything = plain(problem, objective=objective)
    found = assign(problem, size, objective=objective, offload=offload, working=working, end=end)
    fits = (everything.total_bytes if working else everything.kept_bytes) <= size
    if end != "everything" or not fits or (found is not None and found.price < everything.price):
        return found
    return everything if found is None else dataclasses.replace(everything, bound=min(found.bound, everything.price))


def proven(problem: Problem, assignment: Assignment, *, objective: str, offload: bool) -> Assignment:
    """The same choices, priced by a problem, with what no choice within as many bytes is cheaper than."""
    found = repriced(problem, assignment, objective=objective)
    least = assign(problem, found.total_bytes, objective=objective, offload=offload)
    return dataclasses.replace(found, bound=0.0 if least is None else min(found.price, least.bound))


def within_bytes(problem: Problem, size: int, *, objective: str = "seconds", offload: bool = False) -> Assignment:
    """The cheapest choices whose kept bytes and working set stay within a size.

    Raises:
      BudgetInfeasible: the inputs of blocks, and what is kept outside of them, are more.
    """
    found = within(problem, size, objective=objective, offload=offload)
    if found is not None:
        return found
    least, fits = _least(problem, size, lambda each: each.total_bytes, objective)
    if fits:
        return least
    wanted, got = format_apart(size, least.total_bytes)
    raise BudgetInfeasible(
        wanted=f"residuals and a working set within {wanted}",
        got=f"at least {got}: {format_bytes(least.kept_bytes)} of what blocks are "
        f"given and what is kept outside of them, and a working set of {format_bytes(least.working_bytes)}"
        f"{_largest(problem, least)}",
        do="Allow more bytes, or cut the batch into micro-batches.",
    )


def within_share(problem: Problem, share: float, *, objective: str = "seconds", offload: bool = False) -> Assignment:
    """The cheapest choices that keep at most a share of the plain function's residuals; for 0, the least there is.

    Raises:
      BudgetInfeasible: the inputs of blocks, and what is kept outside of them, are more.
    """
    room = problem.share_bytes(share, smallest(problem, objective=objective).kept_bytes)
    found = within(problem, room, objective=objective, offload=offload, working=False)
    if found is not None:
        return found
    if share == 0 or not problem.plain_bytes:
        return smallest(problem, objective=objective)
    least, fits = _least(problem, room, lambda each: each.kept_bytes, objective)
    if fits:
        return least
    wanted, got = format_apart(int(room), least.kept_bytes)
    raise BudgetInfeasible(
        wanted=f"at most {share:g} of the residuals, {wanted} of {format_bytes(problem.plain_bytes)}",
        got=f"at least {least.kept_bytes / problem.plain_bytes:.3g}, {got}: what blocks are given and "
        f"what is kept outside of them{_largest(problem, least)}",
        do="Allow a larger share.",
    )


def _largest(problem: Problem, least: Assignment) -> str:
    values = in_the_way(problem, least)
    return f"; the largest are {values}" if values else ""


def _least(problem: Problem, room: float, size: Callable[[Assignment], int], objective: str) -> tuple[Assignment, bool]:
    """What takes the least, in segments where nothing else stays within the room; whether it does."""
    least = smallest(problem, objective=objective)
    if size(least) <= room:  # the solver ran out of time
        return least, True
    segments = nested(problem, least, objective=objective)
    best = least if segments is None else min(segments, least, key=size)
    return best, size(best) <= room
