"""Loss scaling as a lever: a window that overflowed takes no optimizer step; only its data and key are used up."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import precision
from jaxmem._flax import is_rng_state
from jaxmem._scopes import OPTIMIZER_SCOPE
from jaxmem.config import MemoryConfig
from jaxmem.errors import StateError
from jaxmem.train._lever import Lever, Update, with_own_metrics
from jaxmem.train._spec import StepSpec
from jaxmem.train._state import TrainState


def _state(spec: StepSpec, state: TrainState) -> TrainState:
    scaling = spec.config.dtypes.loss_scale
    return state if scaling is None else dataclasses.replace(state, loss_scale=precision.start_loss_scale(scaling))


def _around(spec: StepSpec, update: Update) -> Update:
    if spec.config.dtypes.loss_scale is None:
        return update

    def scaled(state, batch, **options):
        scale = _current_scale(state)
        new, out, metrics = update(state, batch, loss_scale=scale, **options)
        with jax.named_scope(OPTIMIZER_SCOPE):
            new = _skip_unless(out.finite, new, state, spec.config)
        return new, out, with_own_metrics(metrics, loss_scale=scale, skipped=new.skipped)

    return scaled


def _current_scale(state: TrainState) -> jax.Array:
    """What the objective of this window is multiplied by; StateError for a state that does not say."""
    if not isinstance(state.loss_scale, precision.LossScaleState):
        raise StateError(
            wanted="a state with a loss scale, as this step's config scales losses",
            got=f"state.loss_scale={type(state.loss_scale).__name__}",
            do="Make the state with step.init(), or give it one: dataclasses.replace(state, "
            "loss_scale=jaxmem.precision.start_loss_scale(config.dtypes.loss_scale)).",
        )
    return state.loss_scale.scale


def _skip_unless(finite: jax.Array, new: TrainState, old: TrainState, config: MemoryConfig) -> TrainState:
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


LEVER = Lever(state=_state, around=_around)
