"""`Gradients`: what one optimizer step needs from a batch."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax

from jaxmem._shown import Brief
from jaxmem.accumulate._gradient_sum import Added


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Gradients(Brief):
    """Everything that one optimizer step needs from a batch. It unpacks as what `jax.value_and_grad` returns:
    `loss, grads = out`, or `(loss, aux), grads = out` for a loss with aux.

    Args:
      value: the objective of the whole batch, float32 scalar (float64 if the loss is).
      grads: its gradient, of the structure, shapes and dtypes of `params`.
      metrics: name → value over the whole batch, each reduced by its kind.
      state: model state after the batch.
      weights: total weight of every `WeightedMean` term, in the order of the terms.
      finite: whether `value` and all of `grads` are finite; costs nothing under jit if it is not used.
      added: which gradients were added to their accumulators in place; None for K = 1, which has no accumulators.
      aux: what the loss returned beside its value, over the whole batch.
      has_aux: whether it did.
    """

    value: jax.Array
    grads: Any
    metrics: Any
    state: Any
    weights: tuple[jax.Array, ...]
    finite: jax.Array
    added: Added | None = None
    aux: Any = None
    has_aux: bool = dataclasses.field(default=False, metadata={"static": True})

    def __iter__(self) -> Iterator[Any]:
        yield (self.value, self.aux) if self.has_aux else self.value
        yield self.grads

    def __getitem__(self, index: int) -> Any:
        return tuple(self)[index]
