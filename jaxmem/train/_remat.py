"""What a step's remat setting does to its loss, found out without computing anything."""

import dataclasses
import functools
from typing import TYPE_CHECKING

import jax

from jaxmem import accumulate, remat
from jaxmem.objective import LossOutput
from jaxmem.train._loss import partition

if TYPE_CHECKING:
    from jaxmem.train._step import TrainStep


def examine_step(step: "TrainStep") -> remat.Examination:
    """`remat.examine` of the step's loss on its first micro-batch, differentiated by the trainable parameters."""

    def loss(checkpoint):
        def objective(trainable, frozen, batch, rng, state):
            output = step.loss(frozen, checkpoint=checkpoint)(trainable, batch, rng=rng, state=state)
            return output.objective if isinstance(output, LossOutput) else output

        return objective

    return remat.examine(loss, *loss_arguments(step), argnums=0, policy=step.config.policy)


def loss_arguments(step: "TrainStep") -> tuple:
    """Shapes of what the loss of a step's first micro-batch is traced with: trainable, frozen, batch, rng, state."""
    split = functools.partial(
        accumulate.micro_batch,
        index=0,
        num_micro_batches=step.config.accumulation_steps,
        batch_axes=step.workload.batch_axes,
    )
    state = step.abstract_state()
    trainable, frozen = partition(state.params, step.workload.trainable)
    return trainable, frozen, jax.eval_shape(split, step.abstract_batch()), state.rng, state.state


def compare_residuals(after: "TrainStep", before: "TrainStep") -> remat.ResidualTable:
    """The residuals of one step with those of another beside them."""
    return dataclasses.replace(after.examine().residuals, before=before.examine().residuals)
