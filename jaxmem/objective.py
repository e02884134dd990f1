"""Objectives and metrics: how the values of micro-batches become the value of the whole batch."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxmem._shown import Brief
from jaxmem.errors import MetricError


class Objective(Brief):
    """Base class of terms that can be summed and scaled into an objective; use `WeightedMean` or `Sum`.

    A bare scalar joins a sum as a mean over examples:
    `WeightedMean(ce_sum, num_tokens) + 0.01 * WeightedMean(aux_sum, num_examples) + 1e-4 * l2`.
    """

    __array_ufunc__ = None  # makes numpy scalars on the left defer to __rmul__ and __radd__

    def terms(self) -> "tuple[tuple[Any, Any], ...]":
        return ((1.0, self),)

    def __add__(self, other):
        if not isinstance(other, Objective) and not _is_scalar(other):
            return NotImplemented
        return ObjectiveSum(self.terms() + terms_of(other))

    def __radd__(self, other):
        if isinstance(other, (int, float)) and other == 0:  # the start value of builtins.sum
            return self
        return self + other

    def __mul__(self, factor):
        if not _is_scalar(factor):
            return NotImplemented
        return ObjectiveSum(tuple((f * factor, term) for f, term in self.terms()))

    __rmul__ = __mul__

    def __truediv__(self, divisor):
        if not _is_scalar(divisor):
            return NotImplemented
        return self * (1.0 / divisor)

    def __neg__(self):
        return self * -1.0

    def __sub__(self, other):
        return self + (-other)

    def __rsub__(self, other):
        return -self + other


def terms_of(output: Any) -> tuple[tuple[Any, Any], ...]:
    """(factor, term) of each term of an objective, of a bare scalar, or of the `LossOutput` of either."""
    objective = output.objective if isinstance(output, LossOutput) else output
    return objective.terms() if isinstance(objective, Objective) else ((1.0, objective),)


def _is_scalar(x) -> bool:
    return isinstance(x, (int, float, complex, np.number)) or (hasattr(x, "dtype") and np.shape(x) == ())


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class WeightedMean(Objective):
    """`sum(total) / sum(weight)` over all micro-batches (and data shards).

    Args:
      total: scalar, the weighted sum over this micro-batch, e.g. summed token losses.
      weight: scalar, the sum of the weights, e.g. the number of valid tokens. It must not depend
        on the parameters. A total weight of zero contributes 0, never NaN. Give the count itself: with
        `jnp.maximum(count, 1)` a micro-batch without tokens would have weight 1.

    >>> from jaxmem import WeightedMean
    >>> objective = WeightedMean(6.0, 3) + 0.5 * WeightedMean(4.0, 2)
    >>> [(factor, term.weight) for factor, term in objective.terms()]
    [(1.0, 3), (0.5, 2)]
    """

    total: Any
    weight: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Sum(Objective):
    """A value that is summed over micro-batches: a count, or an objective already divided by a global count.

    A term that belongs to no row, such as a norm of the parameters, would count once per micro-batch; return it as a
    bare scalar.
    """

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Max(Brief):
    """A metric whose maximum over micro-batches is kept."""

    value: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Last(Brief):
    """A metric whose value in the last micro-batch is kept."""

    value: Any


@jax.tree_util.register_pytree_node_class
class ObjectiveSum(Objective):
    """A sum of terms with factors, made by `+` and `*`; factors are constants of the step."""

    def __init__(self, terms):
        self._terms = tuple(terms)

    def terms(self):
        return self._terms

    def __repr__(self):
        return f"ObjectiveSum({self._terms!r})"

    def tree_flatten(self):
        return (self._terms,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[0])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class LossOutput(Brief):
    """A loss's output with metrics or model state, where a bare objective is not enough.

    Args:
      objective: a scalar (mean over examples), a `WeightedMean`, a `Sum`, or a sum of these.
      metrics: name → `WeightedMean`, `Sum`, `Max` or `Last`; the kind is how micro-batches combine.
      state: the new model state, of the structure, shapes and dtypes of the `state` passed in.
    """

    objective: Any
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    state: Any = None

    def __post_init__(self):
        if isinstance(self.metrics, Mapping) and not all(isinstance(name, str) for name in self.metrics):
            raise MetricError(
                wanted="names of metrics that are strings",
                got=", ".join(map(repr, self.metrics)),
                do='For example {"accuracy": WeightedMean(num_correct, num_examples)}.',
            )
