"""`corners`: choices for one block of which none is beaten by a mixture of two others."""

import dataclasses
import heapq

from jaxmem.remat.auto._candidates import Candidates, Choice
from jaxmem.remat.auto._solve import Group, Limits, solve


def corners(candidates: Candidates, limits: Limits, objective: str, most: int) -> list[Choice]:
    """Corners of the convex hull of what a block may keep and what that costs, the sharpest `most` of them.

    Blocks that share a budget need little else: a choice at a corner keeps no byte more than its price is worth, where
    the cheapest choice within a given size fills that size up with what hardly pays. Each is the optimum at some price
    of a byte, which is a minimum cut, so the solver's relaxation is integral.

    Args:
      candidates: of the block.
      limits: only whether values may be offloaded counts.
      objective: "seconds" or "flops".
      most: how many choices at the most.
    """
    one = [Group(candidates=candidates)]
    room = float(candidates.value_bytes.sum())

    def cheapest(byte_price: float) -> Choice | None:
        at = dataclasses.replace(limits, budget_bytes=room, working=False, byte_price=byte_price, seconds=1.0)
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
