"""The running window of `multi_steps`: its weighted mean, and what is known about it."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxmem.accumulate._multi_steps_leaves import is_absent
from jaxmem.errors import ConfigError, StateError
from jaxmem.workload import is_array_like


class Window(NamedTuple):
    """What `multi_steps` keeps in `optax.MultiStepsState.skip_state`.

    Attributes:
      window_weight: float scalar, the sum of the weights in `acc_grads`, which is their weighted mean.
      left_out: int32 scalar, micro-steps of this window that "skip_micro" left out.
      skipped_windows: int32 scalar, windows that ended without an optimizer step.
      updated: bool scalar, whether the last call took an optimizer step.
    """

    window_weight: jax.Array
    left_out: jax.Array
    skipped_windows: jax.Array
    updated: jax.Array

    @classmethod
    def empty(cls, accumulators: list) -> "Window":
        """That before the first call; weights are summed as widely as any gradient, in at least float32."""
        dtypes = [jnp.finfo(leaf.dtype).dtype for leaf in jax.tree.leaves(accumulators)]
        weight_dtype = functools.reduce(jnp.promote_types, dtypes, jnp.float32)
        return cls(
            window_weight=jnp.zeros((), weight_dtype),
            left_out=jnp.zeros((), jnp.int32),
            skipped_windows=jnp.zeros((), jnp.int32),
            updated=jnp.zeros((), jnp.bool_),
        )


def check_state(state: Any) -> None:
    """StateError unless `multi_steps` made the state."""
    if not isinstance(getattr(state, "skip_state", None), Window):
        raise StateError(
            wanted="the state that this optimizer's init made, or a copy of it",
            got=type(state).__name__ + (", made by optax.MultiSteps" if hasattr(state, "skip_state") else ""),
            do="Restore a checkpoint into optimizer.init's structure. From optax.MultiSteps take `inner_opt_state` and "
            "`gradient_step`, at the end of a window: optimizer.init(params)._replace(...).",
        )


def checked_weight(weight: Any, dtype: Any) -> jax.Array:
    """A micro-step's weight as a scalar of `dtype`; ConfigError where it cannot be one."""
    if (
        not is_array_like(weight)
        or jnp.shape(weight) != ()
        or jnp.issubdtype(jnp.result_type(weight), jnp.complexfloating)
    ):
        got = f"{jnp.result_type(weight)}{list(jnp.shape(weight))}" if is_array_like(weight) else repr(weight)
        raise ConfigError(
            wanted="weight to be a real scalar: the denominator of the mean whose gradient is given",
            got=got,
            do="Give for example weight=jnp.sum(mask).",
        )
    if isinstance(weight, (bool, int, float)) and weight < 0:
        raise ConfigError(wanted="weight to be at least 0", got=repr(weight), do="Weights count tokens or examples.")
    return jnp.asarray(weight).astype(dtype)


def add_micro_step(accumulators: list, grads: list, window: Window, weight: Any, *, skip_micro: bool):
    """Accumulators and window after one more micro-step.

    The accumulators hold the mean so far, a + (g - a) w / (W + w): it does not outgrow the accumulator's dtype,
    is what the inner optimizer gets without a pass to divide it, and is what `optax.MultiSteps` keeps.

    Args:
      accumulators: arrays, or MaskedNode where there is none.
      grads: as many, of whatever dtype.
      weight: of this micro-step; None counts as 1.
      skip_micro: leave it out where it is not finite.
    """
    dtype = window.window_weight.dtype
    added = jnp.ones((), dtype) if weight is None else checked_weight(weight, dtype)
    # What weighs nothing changes nothing, even if a mean over no tokens made it NaN.
    counts = None if weight is None else added != 0
    left_out = window.left_out
    if skip_micro:
        finite = all_finite([g for g, acc in zip(grads, accumulators, strict=True) if not is_absent(acc)], added)
        good = finite if counts is None else finite | ~counts
        left_out = left_out + ~good
        counts = good if counts is None else good & counts
    if counts is not None:
        added = jnp.where(counts, added, 0)
    total = window.window_weight + added
    first = window.window_weight == 0
    share = added / jnp.where(total == 0, 1, total)

    def add(acc, grad):
        if is_absent(acc):
            return acc
        wide = jnp.promote_types(acc.dtype, jnp.float32)
        old, new = acc.astype(wide), jnp.asarray(grad).astype(wide)
        # Not with an accumulator multiplied by, or reset to, 0: NaN times 0 is NaN, and zeros would be one more buffer.
        mean = jnp.where(first, new, old + (new - old) * share.astype(wide)).astype(acc.dtype)
        return mean if counts is None else jnp.where(counts, mean, acc)

    accumulators = [add(acc, grad) for acc, grad in zip(accumulators, grads, strict=True)]
    return accumulators, window._replace(window_weight=total, left_out=left_out)


def all_finite(leaves: list, *more: Any) -> jax.Array:
    """Whether all of them are free of NaN and infinities."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in (*leaves, *more)]))
