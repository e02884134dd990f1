"""`mixtures`: different choices for blocks that are alike."""

import dataclasses
import heapq
import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from jaxmem.remat.auto._candidates import Candidates, Choice
from jaxmem.remat.auto._solve import Group, Limits, Rows, minimise, solve

# Of 192 budgets on 12 problems with like blocks 6 points make 3 dearer, by up to 15 %; 24 make none cheaper.
_LEVELS = 12  # points of a block's own frontier, of either kind
_ROOMS = (1.0, 1.02)  # of the budget, while members are divided; the second makes 2 of the 192 cheaper, by up to 15 %
# A search asks for many budgets, which share the frontiers of their blocks.
_FRONTIERS: weakref.WeakKeyDictionary[Candidates, dict] = weakref.WeakKeyDictionary()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixture:
    """Choices of which a group's members take different ones.

    Args:
      members: per group, how many of its members take which choice.
      price: of the objective, for all.
    """

    members: list[dict[Choice, int]]
    price: float


def mixtures(groups: Sequence[Group], limits: Limits, objective: str, chosen: Sequence[Choice]) -> Iterator[Mixture]:
    """Choices within the budget, in no order.

    First the members of a group are divided among points of their block's own frontier. Then the parts stay, and the
    choice for each is solved for anew, all groups together. So a division found with a little more room often fits.

    Args:
      groups: all blocks.
      limits: what the choices must stay within.
      objective: "seconds" or "flops".
      chosen: per group, the best that all of its members can take.
    """
    options = [_options(group, limits, objective, choice) for group, choice in zip(groups, chosen, strict=True)]
    seen = set()
    for room in _ROOMS:
        mixed = _divide(
            groups, options, dataclasses.replace(limits, budget_bytes=room * limits.budget_bytes), objective
        )
        if mixed is None:
            continue
        if room == 1:
            yield mixed
        division = tuple(tuple(sorted(each.values())) for each in mixed.members)
        if division not in seen and any(len(each) > 1 for each in division):
            seen.add(division)
            again = _choose(groups, division, limits, objective)
            if again is not None:
                yield again


def _choose(groups, division, limits: Limits, objective: str) -> Mixture | None:
    """The best choices for parts of groups."""
    parts = [(at, count) for at, counts in enumerate(division) for count in counts]
    split = [dataclasses.replace(groups[at], members=count) for at, count in parts]
    solved = solve(split, limits, objective)
    if solved is None:
        return None
    members: list[dict[Choice, int]] = [{} for _ in groups]
    for (at, count), choice in zip(parts, solved.choices, strict=True):
        members[at][choice] = members[at].get(choice, 0) + count
    return Mixture(members=members, price=solved.price)


def _divide(groups, options: list[list[Choice]], limits: Limits, objective: str) -> Mixture | None:
    """The cheapest division of members among options: a knapsack in which a group takes as many as it has members."""
    pairs = [(g, choice) for g, each in enumerate(options) for choice in each]
    runs = [groups[g].candidates for g, _ in pairs]
    size = np.array([c.kept_bytes(choice) * groups[g].times for c, (g, choice) in zip(runs, pairs, strict=True)], float)
    work = np.array([c.working_bytes(choice) for c, (_, choice) in zip(runs, pairs, strict=True)], float)
    price = np.array([groups[g].times * c.price(x, objective) for c, (g, x) in zip(runs, pairs, strict=True)])
    unit = max(1.0, limits.budget_bytes)
    if limits.working:  # what the last block keeps is freed before the others are differentiated
        last = np.array([groups[g].last for g, _ in pairs], bool)
        end = np.array([c.end_bytes(choice) for c, (_, choice) in zip(runs, pairs, strict=True)], float)
        work, size = np.where(last, end + limits.outside_bytes, work), np.where(last, 0, size)
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
        one = {"low": np.zeros(len(pairs)), "high": most, "integral": np.ones(len(pairs))}
        found = minimise(price, Rows(rows, columns, values, lower), **one)
        if found is not None and (best is None or found.cost < best.price):
            counts = list(zip(pairs, np.round(found.x).astype(int).tolist(), strict=True))
            members = [{x: n for (g, x), n in counts if g == at and n} for at in range(len(groups))]
            best = Mixture(members=members, price=found.cost)
    return best


def _options(group: Group, limits: Limits, objective: str, chosen: Choice) -> list[Choice]:
    """Points of one block's own frontier."""
    if group.members == 1:
        return [chosen]
    known = _FRONTIERS.setdefault(group.candidates, {})
    key = (limits.offload, objective)
    if key not in known:  # whatever the budget
        known[key] = _frontier(group.candidates, limits, objective)
    return list(dict.fromkeys([chosen, *known[key]]))


def _frontier(c: Candidates, limits: Limits, objective: str) -> list[Choice]:
    low, high = c.kept_bytes(c.least), c.kept_bytes(c.plain)
    found = {c.least: None, c.plain: None}
    found |= dict.fromkeys(corners(c, limits, objective, _LEVELS))
    one = Group(candidates=c)
    for size in np.linspace(low, high, _LEVELS)[1:-1]:
        point = solve([one], dataclasses.replace(limits, budget_bytes=size, working=False), objective)
        if point is not None:
            found[point.choices[0]] = None
    return list(found)


def corners(candidates: Candidates, limits: Limits, objective: str, most: int) -> list[Choice]:
    """Corners of the convex hull of what a block may keep and what that costs, the sharpest `most` of them.

    Each corner is the optimum at some price of a byte. That is a minimum cut, so the solver's relaxation is integral.
    The cheapest choice within a given size, in contrast, may fill that size with bytes that hardly lower the price.

    Args:
      candidates: of the block.
      limits: only whether values may be offloaded counts.
      objective: "seconds" or "flops".
      most: how many choices at the most.
    """
    one = [Group(candidates=candidates)]
    room = float(candidates.value_bytes.sum())

    def cheapest(byte_price: float) -> Choice | None:
        at = dataclasses.replace(limits, budget_bytes=room, working=False, byte_price=byte_price)
        found = solve(one, at, objective)
        return None if found is None else found.choices[0]

    def point(choice: Choice) -> tuple[int, float]:
        return candidates.kept_bytes(choice), candidates.price(choice, objective)

    left, right = candidates.least, cheapest(0.0)
    if right is None:
        return []
    found, gaps = {left: None, right: None}, []

    def split(left: Choice, right: Choice) -> None:
        (low, dear), (high, cheap) = point(left), point(right)
        if high <= low or dear <= cheap or len(found) >= most:
            return
        slope = (dear - cheap) / (high - low)
        middle = cheapest(slope)
        if middle is None:
            return
        size, price = point(middle)
        below = dear - slope * (size - low) - price  # under the chord
        if low < size < high and below > 1e-6 * dear:
            heapq.heappush(gaps, (-below, len(gaps) + len(found), left, middle, right))

    split(left, right)
    while gaps and len(found) < most:
        *_, left, middle, right = heapq.heappop(gaps)
        found[middle] = None
        split(left, middle)
        split(middle, right)
    return list(found)
