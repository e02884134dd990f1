"""A window that overflowed takes no optimizer step: everything but what it consumed is as it was."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import precision
from jaxmem._flax import is_rng_state
from jaxmem.config import MemoryConfig
from jaxmem.errors import MetricError, StateError
from jaxmem.train._state import TrainState

SCALING_METRICS = ("loss_scale", "skipped")


def current_scale(state: TrainState, config: MemoryConfig) -> jax.Array | None:
    """What the objective of this window is multiplied by; None where the config scales nothing.

    Raises:
      StateError: the config scales losses, and the state has no scale.
    """
    if config.dtypes.loss_scale is None:
        return None
    if not isinstance(state.loss_scale, precision.LossScaleState):
        raise StateError(
            wanted="a state with a loss scale, as this step's config scales losses",
            got=f"state.loss_scale={type(state.loss_scale).__name__}",
            do="Make the state with step.init(), or give it one: dataclasses.replace(state, "
            "loss_scale=jaxmem.precision.start_loss_scale(config.dtypes.loss_scale)).",
        )
    return state.loss_scale.scale


def skip_unless(finite: jax.Array, new: TrainState, old: TrainState, config: MemoryConfig) -> TrainState:
    """`new`, or, where the window was not finite, `old` with its data and random numbers consumed and the skip counted.

    A select per leaf, which on a GPU fuses into the update and costs nothing: a `lax.cond` there takes twice the
    parameters' bytes in copies.
    """

    def keep(new, old):
        if new is old or is_rng_state(new) or jnp.issubdtype(new.dtype, jax.dtypes.prng_key):
            return new  # a frozen parameter is the same array in both; keys and their counts go on
        return jnp.where(finite, new, old)

    fields: dict[str, Any] = {
        name: jax.tree.map(keep, getattr(new, name), getattr(old, name), is_leaf=is_rng_state)
        for name in ("params", "opt_state", "state")
    }
    return dataclasses.replace(
        new,
        step=old.step + finite.astype(old.step.dtype),
        skipped=old.skipped + (~finite).astype(old.skipped.dtype),
        last_finite=finite,
        loss_scale=precision.next_loss_scale(old.loss_scale, config.dtypes.loss_scale, finite),
        **fields,
    )


def scaling_metrics(new: TrainState, scale: jax.Array | None) -> dict[str, jax.Array]:
    """The window's scale and how many windows were skipped so far; nothing where nothing is scaled."""
    return {} if scale is None else dict(zip(SCALING_METRICS, (scale, new.skipped), strict=True))


def check_metric_names(metrics: dict[str, Any], config: MemoryConfig) -> None:
    """MetricError where the loss names a metric as the step does."""
    own = ("loss",) if config.dtypes.loss_scale is None else ("loss", *SCALING_METRICS)
    for name in own:
        if name in metrics:
            raise MetricError(
                wanted=f"metrics named otherwise than {' and '.join(map(repr, own))}, which are the step's own",
                got=f"a metric named {name!r}",
                do="Rename it.",
            )
