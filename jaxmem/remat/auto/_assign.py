"""`assign`: choices for all blocks of a function within one budget."""

import dataclasses

import numpy as np

from jaxmem.remat.auto._candidates import Choice
from jaxmem.remat.auto._milp import Rows, minimise
from jaxmem.remat.auto._problem import Problem
from jaxmem.remat.auto._solve import Group, Limits, Solved, relaxed_price, solve

_LEVELS = 12  # points of a block's own frontier, of which members of a group may take different ones


@dataclasses.dataclass(frozen=True, kw_only=True)
class Assignment:
    """A choice for every block.

    Args:
      choices: by the block's name.
      kept_bytes: by all blocks and outside of them, on the device; modelled.
      outside_bytes: of these, outside of blocks.
      host_bytes: in host memory.
      working_bytes: of the block with the largest working set.
      recompute_flops, recompute_seconds: what runs a second time.
      price, bound: of the objective, and what no choice is cheaper than.
    """

    choices: dict[str, Choice]
    kept_bytes: int
    outside_bytes: int
    host_bytes: int
    working_bytes: int
    recompute_flops: float
    recompute_seconds: float
    price: float
    bound: float

    @property
    def total_bytes(self) -> int:
        """What a budget bounds: all that is kept, or, while blocks are differentiated, theirs and a working set."""
        return self.kept_bytes - self.outside_bytes + max(self.outside_bytes, self.working_bytes)

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
) -> Assignment | None:
    """The cheapest choices within a budget; None where there are none.

    Args:
      problem: the blocks.
      budget_bytes: for what is kept, outside of blocks too, and, with `working`, the largest working set.
      objective: "seconds" or "flops".
      offload: whether values may wait in host memory.
      seconds: for the solver.
    """
    outside = problem.base_bytes
    limits = Limits(
        budget_bytes=budget_bytes if working else budget_bytes - outside,
        working=working,
        outside_bytes=outside,
        offload=offload,
        seconds=seconds,
    )
    solved = solve(problem.groups, limits, objective)
    if solved is None:
        return None
    members = [{choice: group.members} for group, choice in zip(problem.groups, solved.choices, strict=True)]
    price, bound = solved.price, solved.bound
    if any(group.members > 1 for group in problem.groups):
        bound = min(bound, relaxed_price(problem.groups, limits, objective))
        mixed = _mix(problem.groups, limits, objective, solved)
        if mixed is not None and mixed[1] < price:
            members, price = mixed
    return _assignment(problem, members, price, bound)


def within(
    problem: Problem, size: float, *, objective: str = "seconds", offload: bool = False, working: bool = True
) -> Assignment | None:
    """As `assign`; everything is kept where that stays within the budget, and nothing is cheaper."""
    everything = plain(problem, objective=objective)
    found = assign(problem, size, objective=objective, offload=offload, working=working)
    fits = (everything.total_bytes if working else everything.kept_bytes) <= size
    return everything if fits and (found is None or everything.price <= found.price) else found


def within_share(problem: Problem, share: float, *, objective: str = "seconds", offload: bool = False) -> Assignment:
    """The cheapest choices that keep a share of the plain function's residuals; where there are none, the smallest."""
    found = within(problem, share * problem.plain_bytes, objective=objective, offload=offload, working=False)
    return found or smallest(problem, objective=objective)


def smallest(problem: Problem, *, objective: str = "seconds") -> Assignment:
    """What keeps the least: of each block no more than its inputs."""
    choices = [group.candidates.least for group in problem.groups]
    members = [{choice: group.members} for group, choice in zip(problem.groups, choices, strict=True)]
    price = sum(g.runs * g.candidates.price(c, objective) for g, c in zip(problem.groups, choices, strict=True))
    return _assignment(problem, members, price, 0.0)


def plain(problem: Problem, *, objective: str = "seconds") -> Assignment:
    """What keeps everything."""
    members = [{group.candidates.plain: group.members} for group in problem.groups]
    price = sum(g.runs * g.candidates.price(g.candidates.plain, objective) for g in problem.groups)
    return _assignment(problem, members, price, 0.0)


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
    return Assignment(
        choices=choices,
        outside_bytes=problem.base_bytes,
        kept_bytes=problem.base_bytes + total(lambda c, choice: c.kept_bytes(choice)),
        host_bytes=total(lambda c, choice: int(c.value_bytes[list(choice.offloaded)].sum())),
        working_bytes=max((g.candidates.working_bytes(c) for g, c, _ in pairs), default=0),
        recompute_flops=total(lambda c, choice: c.recompute_flops(choice)),
        recompute_seconds=total(lambda c, choice: float(c.seconds[c.recomputed(choice)].sum())),
        price=price,
        bound=min(price, bound),
    )


def _mix(groups, limits: Limits, objective: str, solved: Solved):
    """Different choices for members of one group: (members by choice, per group; price); None without a solution."""
    options = [_options(group, limits, objective, choice) for group, choice in zip(groups, solved.choices, strict=True)]
    pairs = [(g, choice) for g, each in enumerate(options) for choice in each]
    runs = [groups[g].candidates for g, _ in pairs]
    size = np.array([c.kept_bytes(choice) * groups[g].times for c, (g, choice) in zip(runs, pairs, strict=True)], float)
    work = np.array([c.working_bytes(choice) for c, (_, choice) in zip(runs, pairs, strict=True)], float)
    price = np.array([groups[g].times * c.price(x, objective) for c, (g, x) in zip(runs, pairs, strict=True)])
    unit = max(1.0, limits.budget_bytes)
    work = np.maximum(work, limits.outside_bytes)
    # Options may be used only when the working set allows them, so each level of it is tried as a limit.
    best = None
    for level in sorted(set(work)) if limits.working else [0.0]:
        allowed = work <= level if limits.working else np.ones(len(pairs), bool)
        room = limits.budget_bytes - (level if limits.working else 0)
        rows, columns, values, lower = [], [], [], []
        for at, group in enumerate(groups):  # as many choices as members
            own = [i for i, (g, _) in enumerate(pairs) if g == at]
            for sign in (1.0, -1.0):
                rows += [len(lower)] * len(own)
                columns += own
                values += [sign] * len(own)
                lower.append(sign * group.members)
        rows += [len(lower)] * len(pairs)
        columns += range(len(pairs))
        values += (-size / unit).tolist()
        lower.append(-room / unit)
        most = np.where(allowed, [groups[g].members for g, _ in pairs], 0)
        one = {"low": np.zeros(len(pairs)), "high": most, "integral": np.ones(len(pairs)), "seconds": 2.0}
        found = minimise(price, Rows(rows, columns, values, lower), **one)
        if found is not None and (best is None or found.cost < best[1]):
            counts = list(zip(pairs, np.round(found.x).astype(int).tolist(), strict=True))
            best = [{x: n for (g, x), n in counts if g == at and n} for at in range(len(groups))], found.cost
    return best


def _options(group: Group, limits: Limits, objective: str, chosen: Choice) -> list[Choice]:
    """Points of one block's own frontier."""
    c = group.candidates
    if group.members == 1:
        return [chosen]
    low, high = c.kept_bytes(c.least), c.kept_bytes(c.plain)
    found = {chosen: None, c.least: None, c.plain: None}
    one = Group(candidates=c)
    for size in np.linspace(low, high, _LEVELS)[1:-1]:
        point = solve([one], dataclasses.replace(limits, budget_bytes=size, working=False, seconds=1.0), objective)
        if point is not None:
            found[point.choices[0]] = None
    return list(found)
