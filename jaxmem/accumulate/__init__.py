"""Gradients of a large batch from micro-batches, equal to those of the one-batch step."""

from jaxmem.accumulate._gradient_sum import Added as Added
from jaxmem.accumulate._gradients import Gradients as Gradients
from jaxmem.accumulate._multi_steps import apply_updates as apply_updates
from jaxmem.accumulate._multi_steps import flush as flush
from jaxmem.accumulate._multi_steps import has_updated as has_updated
from jaxmem.accumulate._multi_steps import multi_steps as multi_steps
from jaxmem.accumulate._multi_steps import steps_per_epoch as steps_per_epoch
from jaxmem.accumulate._split import micro_batch as micro_batch
from jaxmem.accumulate._trace import counted_leaves as counted_leaves
from jaxmem.accumulate._value_and_grad import value_and_grad as value_and_grad
from jaxmem.accumulate.separability import Separability as Separability
from jaxmem.accumulate.separability import separable_by_rows as separable_by_rows

# Earlier names.
Independence = Separability
independent_rows = separable_by_rows

__all__ = [
    "Added",
    "Gradients",
    "Independence",
    "Separability",
    "apply_updates",
    "counted_leaves",
    "flush",
    "has_updated",
    "independent_rows",
    "micro_batch",
    "multi_steps",
    "separable_by_rows",
    "steps_per_epoch",
    "value_and_grad",
]
