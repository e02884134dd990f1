"""`TrainState`: everything that changes from step to step."""

import dataclasses
from typing import Any

import jax
from jax.core import Tracer

from jaxmem._shown import Brief
from jaxmem.errors import StateError
from jaxmem.train._leaves import first_difference
from jaxmem.workload import path_string


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState(Brief, identity=("params", "opt_state", "state", "loss_scale", "rng")):
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

    # What comes of the loss stands before the parameters: XLA:GPU schedules in the order of outputs, and passes by the
    # head's weight gradients where the parameters are first. A GPT with a tie there needs 1.84 GiB, else 2.57.
    step: jax.Array
    window: jax.Array
    skipped: jax.Array
    last_finite: jax.Array
    params: Any
    opt_state: Any
    state: Any
    loss_scale: Any
    rng: jax.Array


def check_alive(state: Any, error: BaseException | None = None) -> None:
    """StateError for a state whose arrays were given to a step before."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted():
            raise StateError(
                wanted="a state that is still there",
                got=f"one that a step was given before, which donates it: {path_string(path, root='state')} is deleted",
                do="Go on with the state that the step returned; to keep one, copy it first: jax.tree.map(jnp.copy, "
                "state).",
            ) from error


def check_state(own: TrainState, state: Any, error: BaseException | None = None) -> None:
    """StateError for a state that has other leaves, or leaves of other shapes, than a step's `own`."""
    if not isinstance(state, TrainState):
        raise StateError(
            wanted="a TrainState, as step.init() makes it",
            got=f"a {type(state).__module__.removeprefix('builtins')}.{type(state).__name__}".replace(" .", " "),
            do="Call step.init().",
        ) from error
    # What a missing loss scale means is said where it is used; an optimizer's state may grow, as optax.monitor's does.
    rest = {"loss_scale": None, "opt_state": None}
    wanted, given = (dataclasses.replace(tree, **rest) for tree in (own, state))
    different = first_difference(wanted, given, "state", dtypes=True) or first_difference(
        own.opt_state, state.opt_state, "state/opt_state", dtypes=False, more=True
    )
    if different:
        raise StateError(
            wanted="a state of this step's workload and config",
            got=different,
            do="Make one with step.init(); one restored from a file must be of the same model and optimizer.",
        ) from error
