"""Gradients of a large batch from micro-batches, equal to those of the one-batch step."""

from jaxmem.accumulate._split import micro_batch as micro_batch
from jaxmem.accumulate._trace import counted_leaves as counted_leaves
from jaxmem.accumulate._value_and_grad import Gradients as Gradients
from jaxmem.accumulate._value_and_grad import value_and_grad as value_and_grad

__all__ = ["Gradients", "counted_leaves", "micro_batch", "value_and_grad"]
