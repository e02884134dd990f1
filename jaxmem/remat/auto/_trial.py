"""`Trial`: a choice that was compiled, and which choices compile to nearly the same program."""

import dataclasses
from collections.abc import Sequence

from jaxmem.remat.auto._assignment import Assignment
from jaxmem.remat.auto._problem import Problem

ForwardSeconds = tuple[tuple[float, float], ...]
"""Of a compiled forward pass: by the FLOPs of one run of a kernel with products its seconds, and under 0 the seconds of
all else in a step."""

SAME_PRICE = 2e-3  # prices that differ in less are the same; with 0 there are 3 % more compiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
    """What a compiler made of a choice.

    Args:
      peak_bytes: of the program.
      seconds: of a step, by the compiler's own estimate; None where it makes none.
      forward: the forward pass by the compiler's own cycles; empty where it counts none.
      fresh: whether this took a compile.
      confirmed: whether this process compiled it, now or before, and has not only read of it.
    """

    peak_bytes: int
    seconds: float | None = None
    forward: ForwardSeconds = ()
    fresh: bool = True
    confirmed: bool = True

    def trial(self, assignment: Assignment) -> "Trial":
        """The trial of the choice that was measured."""
        fields = {name: getattr(self, name) for name in ("peak_bytes", "seconds", "forward", "confirmed")}
        return Trial(assignment=assignment, **fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial:
    """One choice and what the compiler made of it; see `Measured`."""

    assignment: Assignment
    peak_bytes: int
    seconds: float | None = None
    forward: ForwardSeconds = ()
    confirmed: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """The cheapest choice that was seen to stay within the budget.

    Args:
      best: that choice.
      trials: everything that was tried, in order.
      compiles: how many of the trials were compiled now, and not remembered.
    """

    best: Trial
    trials: tuple[Trial, ...]
    compiles: int


def alike(problem: Problem, a: Assignment, b: Assignment, differ_bytes: float) -> bool:
    """Whether two assignments have the same choices, or such as compile to nearly the same program.

    Args:
      problem: the blocks.
      a, b: what is compared.
      differ_bytes: nearly the same are those of one price whose kept and offloaded values differ in at most so much.
    """
    if a.segments != b.segments:
        return False
    if a.choices == b.choices:
        return True
    if abs(a.price - b.price) > SAME_PRICE * max(a.price, b.price):
        return False
    differ = 0
    for name, at in problem.group_of.items():
        group, one, other = problem.groups[at], a.choices[name], b.choices[name]
        if (one == group.candidates.plain) != (other == group.candidates.plain):
            return False  # a block without a rule is fused, however little the rule would change
        values = {*one.kept} ^ {*other.kept}, {*one.offloaded} ^ {*other.offloaded}
        differ += group.times * int(group.candidates.value_bytes[[v for each in values for v in each]].sum())
    return differ <= differ_bytes


def room_for(peak_bytes: float, trials: Sequence[Trial]) -> float:
    """Modelled bytes that should compile to a peak.

    By interpolation between the trials next to it, else by the error of the model at the nearest trial.
    """
    below = max((t for t in trials if t.peak_bytes <= peak_bytes), key=lambda t: t.peak_bytes, default=None)
    above = min((t for t in trials if t.peak_bytes > peak_bytes), key=lambda t: t.peak_bytes, default=None)
    if below is not None and above is not None:
        low, high = below.assignment.total_bytes, above.assignment.total_bytes
        if low < high:
            return low + (peak_bytes - below.peak_bytes) / (above.peak_bytes - below.peak_bytes) * (high - low)
    nearest = min(trials, key=lambda t: abs(t.peak_bytes - peak_bytes))
    return peak_bytes - (nearest.peak_bytes - nearest.assignment.total_bytes)
