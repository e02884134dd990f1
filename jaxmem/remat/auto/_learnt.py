"""What compiled choices tell of the seconds of others.

The model prices an equation by a roofline, as if it ran alone, and a kept value by its bytes. A compiler fuses: a
softmax may cost nothing beside the product that it is fused into, and a product many times its arithmetic. So rates are
fitted in two steps. `fitted` takes the forward pass of a compiled step, which every choice runs, and gives each product
the seconds of the products of its FLOPs, and everything else its share of the rest. `Learnt` takes the seconds of the
trials and corrects what is left, by Bayesian regression on what choices run again and keep: a factor for each kind, and
one for each equation and value. It knows how sure it is, so the next compile goes where the most is to be gained.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence

import numpy as np

from jaxmem.remat.auto._assignment import Assignment
from jaxmem.remat.auto._candidates import Candidates
from jaxmem.remat.auto._problem import Problem
from jaxmem.remat.auto._trial import ForwardSeconds, Trial

# Of factors that are one where the model is right: how far they were seen to be off on a TPU v5e.
_OF_KIND = 0.5  # all products, all else that runs again, all that is kept
_OF_ONE = 0.5  # a single equation or value
_NOISE = 2e-4  # of the seconds of a step: what choices that differ in nothing that is modelled differ in
_SCALES = tuple(4.0**i for i in range(-3, 13))  # of the variances of all factors
_MOST, _LEAST = 20.0, 0.02  # a rate is corrected by at most so much


def fitted(problem: Problem, forward: ForwardSeconds) -> Problem:
    """The problem with the seconds of its equations as a compiled forward pass has them.

    Args:
      problem: priced by a roofline.
      forward: seconds by the FLOPs of one run, those without products under 0.
    """
    known = {round(flops): seconds for flops, seconds in forward if flops > 0}
    per_device = lambda c: np.rint(c.flops / problem.shards).astype(np.int64)  # noqa: E731
    ours = {int(n) for group in problem.groups for n in per_device(group.candidates)}
    # Several products in one kernel, and what the compiler divided: their mean rate holds for products not seen alone.
    others = [(flops, seconds) for flops, seconds in known.items() if flops not in ours]
    mean = sum(s for _, s in others or known.items()) / max(1, sum(f for f, _ in others or known.items()))
    rest = sum(g.runs * g.candidates.seconds[g.candidates.flops == 0].sum() for g in problem.groups)
    seen = sum(seconds for flops, seconds in forward if flops == 0) / problem.runs
    factor = min(1.0, max(_LEAST, seen / rest)) if rest and seen else 1.0  # what is fused is in the products' seconds

    def of(c: Candidates) -> Candidates:
        flops = per_device(c)
        products = [known.get(int(n)) or mean * n or s for n, s in zip(flops, c.seconds, strict=True)]
        seconds = np.where(flops > 0, np.array(products), factor * c.seconds)
        return dataclasses.replace(c, seconds=np.clip(seconds, _LEAST * c.seconds, _MOST * c.seconds))

    groups = tuple(dataclasses.replace(group, candidates=of(group.candidates)) for group in problem.groups)
    return dataclasses.replace(problem, groups=groups)


def quickest(passes: Iterable[ForwardSeconds]) -> ForwardSeconds:
    """The least seconds of several forward passes: what these keep besides only adds to what they compute."""
    least: dict[float, float] = {}
    for flops, seconds in itertools.chain.from_iterable(passes):
        least[flops] = min(seconds, least.get(flops, seconds))
    return tuple(sorted(least.items()))


class Learnt:
    """Seconds of a step by choice, as far as trials tell.

    Args:
      problem: the blocks, with their prices.
      trials: with seconds; at least one.
    """

    def __init__(self, problem: Problem, trials: Sequence[Trial]):
        self.problem = problem
        self.rows = np.stack([self._features(t.assignment) for t in trials])
        seconds = np.array([t.seconds for t in trials], float)
        errors = seconds - self._prices([t.assignment for t in trials])
        self.base = float(errors.mean())
        # What every choice has in common is unknown, and may be as much as the whole step.
        self.common = float(seconds.mean()) ** 2
        self.noise = np.eye(len(trials)) * (_NOISE * seconds.mean()) ** 2
        left = errors - self.base
        # All factors may be further off than they were seen to be, as makes the errors the likeliest. That they are
        # nearer takes more than two trials to tell.
        scales = [scale for scale in _SCALES if scale >= 1 or len(trials) > 2]
        self.scale = max(scales, key=lambda scale: self._likelihood(left, scale))
        self.left = np.linalg.solve(self._known(self.common), left)

    def _prices(self, assignments: Sequence[Assignment]) -> np.ndarray:
        return self.problem.runs * np.array([each.price for each in assignments])

    def _known(self, common: float) -> np.ndarray:
        return self._alike(self.rows, self.rows) + common + self.noise

    def _likelihood(self, left: np.ndarray, scale: float) -> float:
        """The logarithm, but for a constant."""
        self.scale = scale
        known = self._known(self.common)
        return float(-0.5 * (np.linalg.slogdet(known)[1] + left @ np.linalg.solve(known, left)))

    def expected(self, assignments: Sequence[Assignment]) -> tuple[np.ndarray, np.ndarray]:
        """Seconds of choices priced by the problem, and the standard deviations of these."""
        rows = np.stack([self._features(each) for each in assignments])
        across = self._alike(rows, self.rows) + self.common
        mean = self.base + self._prices(assignments) + across @ self.left
        sure = np.einsum("ij,ji->i", across, np.linalg.solve(self._known(self.common), across.T))
        own = np.array([self._alike(row[None], row[None])[0, 0] for row in rows]) + self.common
        return mean, np.sqrt(np.maximum(own - sure, 0.0))

    def gain(self, assignments: Sequence[Assignment], best_seconds: float) -> np.ndarray:
        """Seconds by which each choice is expected to be below the best; never negative."""
        mean, deviation = self.expected(assignments)
        deviation = np.maximum(deviation, 1e-12)
        z = (best_seconds - mean) / deviation
        below = np.array([0.5 * math.erfc(-each / math.sqrt(2)) for each in z])
        return deviation * (z * below + np.exp(-0.5 * z**2) / math.sqrt(2 * math.pi))

    def _alike(self, some: np.ndarray, others: np.ndarray) -> np.ndarray:
        """The covariance of the model's errors of choices."""
        kinds = [of @ self._kinds for of in (some, others)]
        return self.scale * (_OF_KIND**2 * kinds[0] @ kinds[1].T + _OF_ONE**2 * some @ others.T)

    def _features(self, assignment: Assignment) -> np.ndarray:
        """Seconds of each equation that runs again and of each value that is kept, group by group."""
        rows = []
        for at, group in enumerate(self.problem.groups):
            c = group.candidates
            row = np.zeros(len(c.equations) + len(c.values))
            for name, of in self.problem.group_of.items():
                if of == at:
                    choice = assignment.choices[name]
                    again = np.where(c.recomputed(choice), c.seconds, 0.0)
                    there = np.zeros(len(c.values))
                    there[list(choice.kept)] = c.keep_seconds[list(choice.kept)]
                    there[list(choice.offloaded)] = c.offload_seconds[list(choice.offloaded)]
                    row += self.problem.runs * group.times * np.concatenate([again, there])
            rows.append(row)
        return np.concatenate(rows)

    @property
    def _kinds(self) -> np.ndarray:
        """Per feature, whether it is of products, of other equations, or of kept values."""
        kinds = []
        for group in self.problem.groups:
            c = group.candidates
            kinds += [(1, 0, 0) if flops else (0, 1, 0) for flops in c.flops] + [(0, 0, 1)] * len(c.values)
        return np.array(kinds, float).reshape(-1, 3)
