"""`TrainState`: everything that changes from step to step."""

import dataclasses
from typing import Any

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """A pytree that a step takes (and donates) and returns.

    Args:
      step: int32 scalar, optimizer steps taken; a skipped window is none.
      window: int32 scalar, batches consumed; data and RNG are indexed by it.
      skipped: int32 scalar, windows that took no optimizer step.
      last_finite: bool scalar, whether the last window's objective was finite; with a loss scale, also its gradients.
      params: all parameters, trainable and frozen.
      opt_state: optimizer state of the trainable parameters.
      state: model state (BatchNorm statistics, RNG counts), or None.
      loss_scale: a `LossScaleState`, None where the config scales nothing.
      rng: PRNG key; window w uses `fold_in(rng, w)`.
    """

    step: jax.Array
    window: jax.Array
    skipped: jax.Array
    last_finite: jax.Array
    params: Any
    opt_state: Any
    state: Any
    loss_scale: Any
    rng: jax.Array
