"""`multi_steps`: an optimizer that steps once for several calls, on their weighted mean gradient; and its helpers."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem.accumulate._multi_steps_window import MultiSteps
from jaxmem.config import float_dtype_name
from jaxmem.errors import ConfigError

NONFINITE = ("skip_window", "skip_micro", "propagate")


def multi_steps(
    optimizer: optax.GradientTransformation,
    every: int | Callable[[Any], Any],
    *,
    accumulator_dtype: Any = jnp.float32,
    nonfinite: str = "skip_window",
    trainable: Any = None,
) -> optax.GradientTransformationExtraArgs:
    r"""An optimizer that steps once in `every` calls of `update`, on the weighted mean of their gradients.

    Where micro-step i gives the gradient :math:`g_i` of a mean over :math:`w_i` tokens, the inner optimizer gets
    :math:`\sum_i w_i g_i / \sum_i w_i`, the gradient of the mean over all tokens. That is exact for an objective of
    one term. Several terms have several weights; use `value_and_grad` for them.

    `update(grads, state, params, *, weight=1, **extra)` returns updates in the parameters' dtypes: those of the inner
    optimizer at the end of a window, and otherwise zeros that change no bit. The inner optimizer runs only at the end
    of a window, so its schedules, moments and clipping see optimizer steps and mean gradients, in the accumulator's
    dtype. It gets the `extra` of the window's last call. Its state keeps the dtypes that its `init` gave it.

    The state is an `optax.MultiStepsState`: `mini_step` counts the calls of this window, `gradient_step` the
    optimizer steps, `acc_grads` is the running mean, and `skip_state` a record with `window_weight`, `left_out`,
    `skipped_windows` and `updated`. It is a pytree of arrays; training resumed from a copy of it in mid-window
    continues bit for bit. `acc_grads` keeps a window's mean until the next call replaces it: setting it to zero would
    cost a copy. `inner_opt_state` may be kept in host memory ("pinned_host"); it is moved to the device at the end of a
    window, and back. In that case jit the step with `out_shardings`: JAX pairs donated buffers by shape alone.

    These leaves get zero updates, no accumulator and no moments: integers, booleans and PRNG keys; leaves that
    `trainable` does not select; and leaves whose gradient the inner optimizer drops (`optax.set_to_zero`) or returns
    unchanged below an `optax.masked`. In the last case optax alone would add the raw gradient to the parameter; here
    `optimizer` is the whole optimizer, not a part of a chain, so the leaf is frozen. An `optax.masked` behind another
    transformation does not mark frozen leaves; `trainable` does.

    Args:
      optimizer: takes the steps; if it needs keywords (`value=`), `update` passes them on.
      every: calls in a window, or a function of the optimizer steps so far (`gradient_step`) that returns it.
      accumulator_dtype: floating-point dtype of `acc_grads`. A parameter of a wider dtype, such as float64, keeps its
        own, unless 16 bits are asked for. Complex leaves use the complex dtype of at least that width.
      nonfinite: what a NaN or an infinity in a gradient or weight does. "skip_window": the window ends without an
        optimizer step. "skip_micro": the call is left out of the mean; if all calls of a window are left out, it ends
        without a step. "propagate": the inner optimizer gets it. In all three cases the call still counts as one of
        the window's, so that windows do not shift against the data. A call of weight 0 changes nothing, even if a
        mean over no tokens made its gradient NaN.
      trainable: what is trained, as in `Workload`: a regular expression searched in each leaf's path
        ("decoder/.*/kernel"), a function `(path, leaf) -> bool`, or a pytree prefix of bools; None for everything.

    Raises:
      ConfigError: an argument has a value that cannot be honoured, or `weight` is no real scalar.
      StateError: the gradients that `update` gets do not match the parameters.

    >>> import jax.numpy as jnp, optax
    >>> from jaxmem import accumulate
    >>> optimizer = accumulate.multi_steps(optax.sgd(1.0), 2)
    >>> params = jnp.zeros(())
    >>> state = optimizer.init(params)
    >>> for tokens, grad in ((1, 4.0), (3, 8.0)):
    ...     updates, state = optimizer.update(jnp.asarray(grad), state, params, weight=tokens)
    ...     params = optax.apply_updates(params, updates)
    >>> float(params), int(state.gradient_step)  # -(1 * 4 + 3 * 8) / 4
    (-7.0, 1)
    """
    if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
        raise ConfigError(
            wanted="optimizer to be an optax.GradientTransformation",
            got=type(optimizer).__name__,
            do="For example multi_steps(optax.adamw(1e-3), 4).",
        )
    if not callable(every) and (isinstance(every, bool) or not isinstance(every, (int, np.integer)) or every < 1):
        raise ConfigError(
            wanted="every to be a whole number of at least 1, or a function of the optimizer steps so far",
            got=repr(every),
            do="Use 1 for no accumulation.",
        )
    if nonfinite not in NONFINITE:
        raise ConfigError(
            wanted=f"nonfinite to be one of {', '.join(NONFINITE)}",
            got=repr(nonfinite),
            do="Leave it out to skip windows with a NaN or an infinity.",
        )
    wrapper = MultiSteps(
        inner=optax.with_extra_args_support(optimizer),
        every=every,
        accumulator_dtype=jnp.dtype(float_dtype_name(accumulator_dtype, "accumulator_dtype")),
        nonfinite=nonfinite,
        trainable=trainable,
    )
    return optax.GradientTransformationExtraArgs(wrapper.init, wrapper.update)


def flush(optimizer: optax.GradientTransformation, state: optax.MultiStepsState, params: Any, **extra: Any):
    """Ends a window early, as at the end of an epoch: one optimizer step on the mean so far.

    Args:
      optimizer: made by `multi_steps`.
      state, params: as for its `update`.
      **extra: keywords for the inner optimizer.

    Returns:
      (updates, state); zero updates and the same state if the window is empty. May be traced.

    Raises:
      ConfigError: `multi_steps` did not make the optimizer.

    >>> import jax.numpy as jnp, optax
    >>> from jaxmem import accumulate
    >>> optimizer, params = accumulate.multi_steps(optax.sgd(1.0), 4), jnp.zeros(())
    >>> _, state = optimizer.update(jnp.asarray(3.0), optimizer.init(params), params)
    >>> updates, state = accumulate.flush(optimizer, state, params)
    >>> float(updates), int(state.mini_step), int(state.gradient_step)
    (-3.0, 0, 1)
    """
    wrapper = getattr(getattr(optimizer, "update", None), "__self__", None)
    if not isinstance(wrapper, MultiSteps):
        raise ConfigError(
            wanted="an optimizer made by jaxmem.accumulate.multi_steps",
            got=type(optimizer).__name__,
            do="Make multi_steps the outermost: multi_steps(optax.chain(...), every).",
        )
    return wrapper.flush(state, params, extra)


def has_updated(state: Any) -> jax.Array:
    """Whether the last `update` or `flush` took an optimizer step: a bool scalar, for EMAs and logs that count steps.

    `optax.MultiSteps.has_updated` reads `mini_step`, and so counts a skipped window as a step.

    >>> import jax.numpy as jnp, optax
    >>> from jaxmem import accumulate
    >>> optimizer = accumulate.multi_steps(optax.sgd(1.0), 1)
    >>> _, state = optimizer.update(jnp.asarray(jnp.nan), optimizer.init(jnp.zeros(())))
    >>> bool(accumulate.has_updated(state)), int(state.skip_state.skipped_windows)
    (False, 1)
    """
    return state.skip_state.updated


def apply_updates(params: Any, updates: Any) -> Any:
    """`optax.apply_updates` for parameters that may hold PRNG keys, which cannot be added to.

    Args:
      params: pytree of parameters.
      updates: of `multi_steps`; a leaf of dtype float0, or None, leaves the parameter unchanged.

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
    """Number of optimizer steps of `multi_steps(…, every)` in an epoch, a short last window included (see `flush`).

    A schedule over the whole of training counts these steps, not calls of `update`.

    Args:
      num_examples: in the epoch.
      batch_size: examples in one call of `update`.
      every: as for `multi_steps`.
      drop_last: whether a short last batch is dropped.
      first_step: `gradient_step` at the start of the epoch, for an `every` that depends on it.

    Raises:
      ConfigError: a number is not whole, or too small.

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
