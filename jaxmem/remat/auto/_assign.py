"""`assign`: choices for all blocks of a function within one budget."""

import dataclasses
from collections.abc import Callable, Sequence

from jaxmem.remat.auto._candidates import Choice
from jaxmem.remat.auto._mixtures import mixtures
from jaxmem.remat.auto._problem import Problem
from jaxmem.remat.auto._solve import Group, Limits, heavy, relaxed_price, solve


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """A choice for every block.

    Args:
      choices: by the block's name.
      kept_bytes: by all blocks and outside of them, on the device; modelled.
      outside_bytes: of these, outside of blocks and by the last: gone when the backward pass comes to the others.
      end_bytes: these, and the working set of the last block.
      host_bytes: in host memory.
      working_bytes: of the block with the largest working set.
      recompute_flops, recompute_seconds: what runs a second time.
      price: of the objective.
      bound: no choice that keeps as little is cheaper; 0 where nothing was proven.
      segments: lengths of the segments in which scans are run, by the name of the block that is their body.
    """

    choices: dict[str, Choice]
    kept_bytes: int
    outside_bytes: int
    end_bytes: int
    host_bytes: int
    working_bytes: int
    recompute_flops: float
    recompute_seconds: float
    price: float
    bound: float
    segments: dict[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    @property
    def total_bytes(self) -> int:
        """What a budget bounds: all that is kept, or, while blocks are differentiated, theirs and a working set."""
        return self.kept_bytes - self.outside_bytes + max(self.end_bytes, self.working_bytes)

    @property
    def gap(self) -> float:
        """How far the price may be from the cheapest, as a share of it."""
        return 0.0 if self.price <= 0 else max(0.0, (self.price - self.bound) / self.price)


def assign(
    problem: Problem,
    budget_bytes: float,
    *,
    objective: str = "seconds",
    working: bool = True,
    offload: bool = False,
    seconds: float = 10.0,
    without: Sequence[Assignment] = (),
    unlike: Sequence[Assignment] = (),
) -> Assignment | None:
    """The cheapest choices within a budget; None where there are none.

    Args:
      problem: the blocks.
      budget_bytes: for what is kept, outside of blocks too, and, with `working`, the largest working set.
      objective: "seconds" or "flops".
      offload: whether values may wait in host memory.
      seconds: for the solver.
      without: what is known to be no solution, where all members of a group have the same choice.
      unlike: the same, and all that run the same equations of weight again.
    """
    outside = problem.base_bytes
    limits = Limits(
        budget_bytes=budget_bytes if working else budget_bytes - outside,
        working=working,
        outside_bytes=outside,
        offload=offload,
        seconds=seconds,
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
        # Parts of groups are not what was found to be no solution.
        free = dataclasses.replace(limits, without=(), unlike=())
        for mixed in mixtures(problem.groups, free, objective, solved.choices):
            if mixed.price < price and not _is_excluded(problem, mixed.members, limits, objective):
                members, price = mixed.members, mixed.price
    if without or unlike:  # a bound of all choices, since of those excluded not all were tried
        free = assign(problem, budget_bytes, objective=objective, working=working, offload=offload, seconds=seconds)
        bound = 0.0 if free is None else free.bound
    return _assignment(problem, members, price, bound)


def _is_excluded(problem: Problem, members: Sequence[dict[Choice, int]], limits: Limits, objective: str) -> bool:
    if any(len(each) > 1 for each in members):
        return False
    choices = tuple(choice for (choice,) in members)
    return choices in limits.without or any(_run_alike(problem, choices, other, objective) for other in limits.unlike)


def _run_alike(problem: Problem, some: Sequence[Choice], others: Sequence[Choice], objective: str) -> bool:
    """Whether two choices, one per group, run the same equations of weight again."""
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
    problem: Problem, size: float, *, objective: str = "seconds", offload: bool = False, working: bool = True
) -> Assignment | None:
    """As `assign`; everything is kept where that stays within the budget, and nothing is cheaper."""
    everything = plain(problem, objective=objective)
    found = assign(problem, size, objective=objective, offload=offload, working=working)
    fits = (everything.total_bytes if working else everything.kept_bytes) <= size
    if not fits or (found is not None and found.price < everything.price):
        return found
    return everything if found is None else dataclasses.replace(everything, bound=min(found.bound, everything.price))


def smallest(problem: Problem, *, objective: str = "seconds") -> Assignment:
    """What keeps the least: of each block no more than its inputs."""
    return uniform(problem, lambda group: group.candidates.least, objective=objective)


def plain(problem: Problem, *, objective: str = "seconds") -> Assignment:
    """What keeps everything."""
    return uniform(problem, lambda group: group.candidates.plain, objective=objective)


def uniform(problem: Problem, kind: Callable[[Group], Choice], *, objective: str = "seconds") -> Assignment:
    """One choice for all blocks of a group."""
    choices = [kind(group) for group in problem.groups]
    return assigned(problem, {name: choices[at] for name, at in problem.group_of.items()}, objective=objective)


def assigned(problem: Problem, choices: dict[str, Choice], *, objective: str = "seconds") -> Assignment:
    """Given choices, by the block's name, with what they cost."""
    members: list[dict[Choice, int]] = [{} for _ in problem.groups]
    for name, choice in choices.items():
        counts = members[problem.group_of[name]]
        counts[choice] = counts.get(choice, 0) + 1
    price = sum(
        group.times * count * group.candidates.price(choice, objective)
        for group, counts in zip(problem.groups, members, strict=True)
        for choice, count in counts.items()
    )
    return dataclasses.replace(_assignment(problem, members, price, 0.0), choices=dict(choices))


def _assignment(problem: Problem, members, price: float, bound: float) -> Assignment:
    left = [dict(each) for each in members]
    choices = {}
    for name, at in problem.group_of.items():
        choice = next(c for c, count in left[at].items() if count)
        left[at][choice] -= 1
        choices[name] = choice
    pairs = [
        (group, choice, count)
        for group, each in zip(problem.groups, members, strict=True)
        for choice, count in each.items()
        if count
    ]
    total = lambda of: sum(of(g.candidates, c) * g.times * n for g, c, n in pairs)  # noqa: E731
    outside = problem.base_bytes + sum(g.candidates.kept_bytes(c) for g, c, _ in pairs if g.last)
    return Assignment(
        choices=choices,
        outside_bytes=outside,
        end_bytes=outside + sum(g.candidates.working_bytes(c) for g, c, _ in pairs if g.last),
        kept_bytes=problem.base_bytes + total(lambda c, choice: c.kept_bytes(choice)),
        host_bytes=total(lambda c, choice: int(c.value_bytes[list(choice.offloaded)].sum())),
        working_bytes=max((g.candidates.working_bytes(c) for g, c, _ in pairs), default=0),
        recompute_flops=total(lambda c, choice: c.recompute_flops(choice)),
        recompute_seconds=total(lambda c, choice: float(c.seconds[c.recomputed(choice)].sum())),
        price=price,
        bound=min(price, bound),
    )
