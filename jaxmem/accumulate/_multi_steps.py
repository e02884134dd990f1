"""`multi_steps`: an optimizer that steps once for several calls, on their weighted mean gradient."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from jaxmem.accumulate._multi_steps_run import MultiSteps
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
    :math:`\sum_i w_i g_i / \sum_i w_i`, the gradient of the mean over all of them. That is exact for an objective
    of one term; several terms have weights of their own, for which there is `value_and_grad`.

    `update(grads, state, params, *, weight=1, **extra)` returns updates of the parameters' dtypes: those of the
    inner optimizer at the end of a window, and otherwise zeros that change no bit. The inner optimizer runs only
    then, so its schedules, moments and clipping see optimizer steps and mean gradients, in the accumulator's dtype.
    It gets the `extra` of the window's last call. Its state keeps the dtypes that its `init` gave it.

    The state is an `optax.MultiStepsState`: `mini_step` counts the calls of this window, `gradient_step` the
    optimizer steps, `acc_grads` is the mean so far, and `skip_state` a record with `window_weight`, `left_out`,
    `skipped_windows` and `updated`. It is a pytree of arrays; training that resumes from a copy of it in mid-window
    goes on bit for bit. `acc_grads` keeps a window's mean until the next call replaces it: setting it to zero would
    cost a copy. `inner_opt_state` may be kept in host memory ("pinned_host"); it is brought over at the end of a
    window and put back. Jit the step with `out_shardings` then: JAX pairs donated buffers by shape alone.

    These leaves get zero updates, no accumulator and no moments: integers, booleans and PRNG keys, whatever
    `trainable` does not pick, and those whose gradient the inner optimizer drops (`optax.set_to_zero`) or hands
    through unchanged below an `optax.masked`. There this departs from `optax.masked`, by which a masked-out
    parameter would have its raw gradient added to it: here `optimizer` is the whole optimizer, not a part of a
    chain. An `optax.masked` behind another transformation is not taken for a frozen leaf; `trainable` says it clearly.

    Args:
      optimizer: what takes the steps; it may need keywords (`value=`), which `update` hands on.
      every: calls in a window, or a function of the optimizer steps so far (`gradient_step`) that returns it.
      accumulator_dtype: floating-point dtype of `acc_grads`, or the parameter's own where that is wider, as float64 is;
        one of 16 bits is taken at its word. Complex leaves take the complex one at least as wide.
      nonfinite: what a NaN or an infinity in a gradient or weight does. "skip_window": its window ends without an
        optimizer step. "skip_micro": that call is left out of the mean; a window of which nothing is left ends
        without a step. "propagate": it reaches the inner optimizer. In all three that call still counts as one of
        the window's, so that windows do not slip against the data. A call of weight 0 changes nothing, even if a
        mean over no tokens made its gradient NaN.
      trainable: what is trained, as in `Workload`: a regular expression searched in each leaf's path
        ("decoder/.*/kernel"), a function `(path, leaf) -> bool`, or a pytree prefix of bools; None for everything.

    Raises:
      ConfigError: for arguments that it cannot honour, and for a `weight` that is no real scalar.
      StateError: when `update` gets gradients that are not those of the parameters.

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
    """Ends a window early: the optimizer step of what has been accumulated, as at the end of an epoch.

    Args:
      optimizer: made by `multi_steps`.
      state, params: as for its `update`.
      **extra: keywords for the inner optimizer.

    Returns:
      (updates, state), with zero updates and the same state where the window is empty. May be traced.

    Raises:
      ConfigError: an optimizer that `multi_steps` did not make.

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
