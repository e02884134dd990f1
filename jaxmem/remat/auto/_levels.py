"""Choices at other levels of memory than a budget: what a compiler may run faster than what the model prefers."""

from collections.abc import Iterator, Sequence

import numpy as np

from jaxmem.remat.auto._assignment import Assignment, assigned, nested, standard
from jaxmem.remat.auto._candidates import Candidates, Choice
from jaxmem.remat.auto._learnt import Learnt
from jaxmem.remat.auto._mixtures import corners
from jaxmem.remat.auto._problem import Problem
from jaxmem.remat.auto._solve import Limits
from jaxmem.remat.auto._trial import Trial

_CORNERS = 6  # of a block's own frontier
_GAIN = 1e-3  # of a step's seconds: where less is expected of a compile, the search ends,
_SOME = 3  # once there are so many trials, of different levels
_AS_FAST = 1.02  # of the fastest so far: up to this a built-in policy is compiled, whatever gain is expected


def most_promising(
    problem: Problem,
    trials: Sequence[Trial],
    fastest: Trial,
    proposed: Sequence[Assignment],
    room_bytes: float,
    *,
    last: bool = False,
) -> Assignment | None:
    """The choice by which the most seconds are expected to be gained; None where that is too little for a compile.

    The last compile is for the fastest of JAX's built-in policies, if it may be as fast as what was found: how a
    compiler places what differs by a statistic, no rate tells.

    Args:
      problem: the blocks, with fitted rates.
      trials: so far, priced by the problem.
      fastest: the one to be beaten.
      proposed: choices of the solver, which count beside those of `levels`.
      room_bytes: modelled bytes that are likely to fit.
      last: whether one more compile is all there is.
    """
    best, tried = fastest.seconds or 0.0, [t.assignment.choices for t in trials]
    pool = [*proposed, *levels(problem, fastest.assignment)]
    pool = [each for each in pool if each.total_bytes <= room_bytes and each.choices not in tried]
    if not pool:
        return None
    timed = [t for t in trials if t.seconds is not None]
    learnt = Learnt(problem, timed)
    policy = _policy(problem, learnt, room_bytes, _AS_FAST * best)
    policy = None if policy is None or policy.choices in tried else policy
    gains = learnt.gain(pool, best)
    most = int(np.argmax(gains))
    if gains[most] >= _GAIN * best:
        return policy if last and policy is not None else pool[most]
    # What differs the most from what was tried shows whether the model is right.
    differs = lambda each: min(abs(each.kept_bytes - t.assignment.kept_bytes) for t in trials)  # noqa: E731
    return max(pool, key=differs) if len(timed) < _SOME else policy


def _policy(problem: Problem, learnt: Learnt, room_bytes: float, most_seconds: float) -> Assignment | None:
    """Of JAX's built-in policies that fit, the one expected to be the fastest; None where it is too slow."""
    policies = [each for each in standard(problem).values() if each.total_bytes <= room_bytes]
    if not policies:
        return None
    seconds, _ = learnt.expected(policies)
    at = int(np.argmin(seconds))
    return policies[at] if seconds[at] <= most_seconds else None


def smallest_levels(problem: Problem, least: Assignment | None, objective: str) -> Iterator[Assignment]:
    """What may fit where neither the cheapest choices nor the smallest did: JAX's policies, and segments."""
    policies = standard(problem, objective=objective)
    yield policies["full"]
    segments = least and nested(problem, least, objective=objective)
    yield from () if segments is None else (segments,)
    yield from (policies[name] for name in ("dots_no_batch", "dots", "none"))


def levels(problem: Problem, best: Assignment) -> Iterator[Assignment]:
    """Choices from the smallest to the largest, and the neighbours of a choice; some of them more than once.

    What JAX's built-in policies keep, the corners of the frontiers of blocks, and the given choice with one value kept
    or not kept that a policy of names might tell apart: a product, or what the choice keeps itself.

    Args:
      problem: the blocks.
      best: the choice for which neighbours are wanted; it stands for the blocks that another choice leaves as they are.
    """
    yield from standard(problem).values()
    for at, group in enumerate(problem.groups):
        if group.last:
            continue
        names = [name for name, of in problem.group_of.items() if of == at]
        for choice in corners(group.candidates, Limits(budget_bytes=0), "seconds", _CORNERS):
            yield assigned(problem, best.choices | dict.fromkeys(names, choice))
        told_apart = {value for name in names for value in _told_apart(group.candidates, best.choices[name])}
        for value in sorted(told_apart):
            changed = {name: _turned(group.candidates, best.choices[name], value) for name in names}
            yield assigned(problem, best.choices | changed)


def _told_apart(c: Candidates, choice: Choice) -> Iterator[int]:
    """Values whose fate a neighbour changes, by index."""
    for value, equation in enumerate(c.maker):
        product = equation >= 0 and c.flops[equation] > 0
        if (product or value in choice.kept) and not c.is_input[value]:
            yield value


def _turned(c: Candidates, choice: Choice, value: int) -> Choice:
    """The choice that keeps one value more, or does not keep it."""
    wanted = np.zeros(len(c.values), bool)
    wanted[list(choice.kept)] = True
    wanted[value] = not wanted[value]
    return c.keeping(wanted)
