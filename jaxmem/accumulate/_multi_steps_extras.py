"""What a training loop round `multi_steps` needs: was a step taken, how many make an epoch, keys left alone."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import optax

from jaxmem.errors import ConfigError


def has_updated(state: Any) -> jax.Array:
    """Whether the last `update` or `flush` took an optimizer step: a bool scalar, for EMAs and logs that count steps.

    `optax.MultiSteps.has_updated` looks at `mini_step`, and so takes a skipped window for a step.

    >>> import jax.numpy as jnp, optax
    >>> from jaxmem import accumulate
    >>> optimizer = accumulate.multi_steps(optax.sgd(1.0), 1)
    >>> _, state = optimizer.update(jnp.asarray(jnp.nan), optimizer.init(jnp.zeros(())))
    >>> bool(accumulate.has_updated(state)), int(state.skip_state.skipped_windows)
    (False, 1)
    """
    return state.skip_state.updated


def apply_updates(params: Any, updates: Any) -> Any:
    """`optax.apply_updates` for parameters that may hold PRNG keys, which can be added to nothing.

    Args:
      params: pytree of parameters.
      updates: of `multi_steps`; a leaf of dtype float0, or None, leaves the parameter as it is.

    >>> import jax, jax.numpy as jnp
    >>> from jaxmem import accumulate
    >>> params = {"key": jax.random.key(0), "w": jnp.ones(())}
    >>> optimizer = accumulate.multi_steps(optax.sgd(1.0), 1)
    >>> updates, _ = optimizer.update({"key": None, "w": jnp.ones(())}, optimizer.init(params), params)
    >>> float(accumulate.apply_updates(params, updates)["w"])
    0.0
    """

    def apply(leaf, update):
        if leaf is None or update is None or getattr(update, "dtype", None) == jax.dtypes.float0:
            return leaf
        return optax.apply_updates(leaf, update)

    return jax.tree.map(apply, params, updates, is_leaf=lambda node: node is None)


def steps_per_epoch(
    num_examples: int,
    batch_size: int,
    every: int | Callable[[Any], Any],
    *,
    drop_last: bool = False,
    first_step: int = 0,
) -> int:
    """How many optimizer steps `multi_steps(…, every)` takes in an epoch, a short last window included (see `flush`).

    That is what a schedule over the whole of training counts, and not calls of `update`.

    Args:
      num_examples: in the epoch.
      batch_size: examples of one call of `update`.
      every: as for `multi_steps`.
      drop_last: whether the last batch is dropped where it is short.
      first_step: `gradient_step` at the start of the epoch, for an `every` that depends on it.

    Raises:
      ConfigError: a number that is not whole, or too small.

    >>> from jaxmem import accumulate
    >>> accumulate.steps_per_epoch(1000, 32, 8)  # 32 batches, the last of 8 examples, in 4 windows
    4
    >>> accumulate.steps_per_epoch(1000, 32, 7)
    5
    """
    examples = _whole("num_examples", num_examples, 0)
    batch_size = _whole("batch_size", batch_size, 1)
    batches = examples // batch_size if drop_last else -(-examples // batch_size)
    if not callable(every):
        return -(-batches // _whole("every", every, 1))
    steps = 0
    while batches > 0:
        batches -= max(1, int(every(first_step + steps)))  # a window has at least one call
        steps += 1
    return steps


def _whole(name: str, value: Any, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < least:
        raise ConfigError(
            wanted=f"{name} to be a whole number of at least {least}",
            got=repr(value),
            do="Count examples, not batches, and calls of update, not steps.",
        )
    return number
