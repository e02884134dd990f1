"""Gradients of a large batch from micro-batches, equal to those of the one-batch step."""

from jaxmem.accumulate._in_place import Added as Added
from jaxmem.accumulate._independent import Independence as Independence
from jaxmem.accumulate._independent import independent_rows as independent_rows
from jaxmem.accumulate._multi_steps import flush as flush
from jaxmem.accumulate._multi_steps import multi_steps as multi_steps
from jaxmem.accumulate._multi_steps_extras import apply_updates as apply_updates
from jaxmem.accumulate._multi_steps_extras import has_updated as has_updated
from jaxmem.accumulate._multi_steps_extras import steps_per_epoch as steps_per_epoch
from jaxmem.accumulate._split import micro_batch as micro_batch
from jaxmem.accumulate._trace import counted_leaves as counted_leaves
from jaxmem.accumulate._value_and_grad import Gradients as Gradients
from jaxmem.accumulate._value_and_grad import value_and_grad as value_and_grad

__all__ = [
    "Added",
    "Gradients",
    "Independence",
    "apply_updates",
    "counted_leaves",
    "flush",
    "has_updated",
    "independent_rows",
    "micro_batch",
    "multi_steps",
    "steps_per_epoch",
    "value_and_grad",
]
