"""The running loss scale of a training state, and its update after a window."""

import dataclasses

import jax
import jax.numpy as jnp

from jaxmem._shown import Brief
from jaxmem.loss_scale import DynamicLossScale


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScaleState(Brief):
    """The state of a loss scale: a pytree of three arrays. The config holds the rule by which it changes.

    Args:
      scale: float32 scalar, the factor of the next window's objective.
      good_windows: int32 scalar, finite windows since the scale last changed.
      skipped_in_a_row: int32 scalar, windows skipped since the last finite one.
    """

    scale: jax.Array
    good_windows: jax.Array
    skipped_in_a_row: jax.Array


def start_loss_scale(spec: float | DynamicLossScale) -> LossScaleState:
    """The state before the first window.

    Args:
      spec: the rule by which the scale changes, or a number for a constant scale.

    >>> float(start_loss_scale(DynamicLossScale()).scale)
    32768.0
    """
    initial = spec.initial if isinstance(spec, DynamicLossScale) else spec
    return LossScaleState(
        scale=jnp.full((), initial, jnp.float32),
        good_windows=jnp.zeros((), jnp.int32),
        skipped_in_a_row=jnp.zeros((), jnp.int32),
    )


def next_loss_scale(state: LossScaleState, spec: float | DynamicLossScale, finite: jax.Array) -> LossScaleState:
    """The state after a window.

    Args:
      state: before the window.
      spec: as in `start_loss_scale`.
      finite: bool scalar, whether the window's loss and gradients were finite.

    >>> spec = DynamicLossScale(initial=4, growth_interval=1, max=8)
    >>> state, scales = start_loss_scale(spec), []
    >>> for finite in (True, True, False):
    ...     state = next_loss_scale(state, spec, jnp.array(finite))
    ...     scales.append(float(state.scale))
    >>> scales
    [8.0, 8.0, 4.0]
    """
    skipped = jnp.where(finite, 0, state.skipped_in_a_row + 1)
    if not isinstance(spec, DynamicLossScale):  # also if the state was restored from a run with another scale
        return dataclasses.replace(start_loss_scale(spec), skipped_in_a_row=skipped)
    good = jnp.where(finite, state.good_windows + 1, 0)
    grows = good >= spec.growth_interval
    factor = jnp.where(finite, jnp.where(grows, spec.factor, 1.0), 1 / spec.factor)
    return LossScaleState(
        # Clipped on both sides each time, so that a restored scale returns to these bounds.
        scale=jnp.clip(state.scale * factor.astype(jnp.float32), spec.min, spec.max),
        good_windows=jnp.where(grows, 0, good),
        skipped_in_a_row=skipped,
    )
