"""`multi_steps` itself: the running window, its weighted mean, and what happens at each call and at a window's end."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem._scopes import ACCUMULATE_SCOPE, OPTIMIZER_SCOPE
from jaxmem.accumulate import _multi_steps_leaves as _leaves
from jaxmem.accumulate._reduce import accumulator_dtype_of
from jaxmem.errors import ConfigError, StateError
from jaxmem.workload import is_array_like


class Window(NamedTuple):
    """The record in `optax.MultiStepsState.skip_state`.

    Attributes:
      window_weight: float scalar, the sum of the weights whose mean `acc_grads` is.
      left_out: int32 scalar, number of micro-steps of this window that "skip_micro" left out.
      skipped_windows: int32 scalar, number of windows that ended without an optimizer step.
      updated: bool scalar, whether the last call took an optimizer step.
    """

    window_weight: jax.Array
    left_out: jax.Array
    skipped_windows: jax.Array
    updated: jax.Array

    @classmethod
    def empty(cls, accumulators: list) -> "Window":
        """The window before the first call. Weights are summed in the widest dtype of the gradients, or float32."""
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
    """A micro-step's weight as a scalar of `dtype`; ConfigError if it is no real scalar, or negative."""
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

    The accumulators hold the running mean, a + (g - a) w / (W + w). A mean does not outgrow the accumulator's dtype,
    the inner optimizer gets it without another pass to divide, and `optax.MultiSteps` keeps it too.

    Args:
      accumulators: arrays, or MaskedNode for leaves without one.
      grads: one for each accumulator, of any dtype.
      weight: of this micro-step; None counts as 1.
      skip_micro: leave the micro-step out if it is not finite.
    """
    dtype = window.window_weight.dtype
    added = jnp.ones((), dtype) if weight is None else checked_weight(weight, dtype)
    # A micro-step of weight 0 changes nothing, even if a mean over no tokens made its gradient NaN.
    counts = None if weight is None else added != 0
    left_out = window.left_out
    if skip_micro:
        finite = all_finite(
            [g for g, acc in zip(grads, accumulators, strict=True) if not _leaves.is_absent(acc)], added
        )
        good = finite if counts is None else finite | ~counts
        left_out = left_out + ~good
        counts = good if counts is None else good & counts
    if counts is not None:
        added = jnp.where(counts, added, 0)
    total = window.window_weight + added
    first = window.window_weight == 0
    share = added / jnp.where(total == 0, 1, total)

    def add(acc, grad):
        if _leaves.is_absent(acc):
            return acc
        wide = jnp.promote_types(acc.dtype, jnp.float32)
        old, new = acc.astype(wide), jnp.asarray(grad).astype(wide)
        # The accumulator is neither multiplied by 0, since NaN times 0 is NaN, nor reset, which would cost a buffer.
        mean = jnp.where(first, new, old + (new - old) * share.astype(wide)).astype(acc.dtype)
        return mean if counts is None else jnp.where(counts, mean, acc)

    accumulators = [add(acc, grad) for acc, grad in zip(accumulators, grads, strict=True)]
    return accumulators, window._replace(window_weight=total, left_out=left_out)


def all_finite(leaves: list, *more: Any) -> jax.Array:
    """Whether no element is NaN or infinite."""
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in (*leaves, *more)]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiSteps:
    """The arguments of `multi_steps`; the bound methods are the transformation."""

    inner: optax.GradientTransformationExtraArgs
    every: Any
    accumulator_dtype: Any
    nonfinite: str
    trainable: Any

    def init(self, params: Any) -> optax.MultiStepsState:
        leaves, tree = jax.tree.flatten(params)
        trained = _leaves.trained_leaves(params, self.trainable)
        inner_params = tree.unflatten(_leaves.only(leaves, trained))
        inner_state = jax.tree.map(_strong, self.inner.init(inner_params))
        read = _leaves.read_leaves(self.inner, inner_params, inner_state, self.accumulator_dtype)
        read = tree.flatten_up_to(read)  # False or absent: no accumulator
        accumulators = [
            _leaves.zero_accumulator(leaf, self.accumulator_dtype) if yes is True else optax.MaskedNode()
            for leaf, yes in zip(leaves, read, strict=True)
        ]
        return optax.MultiStepsState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=jnp.zeros((), jnp.int32),
            inner_opt_state=inner_state,
            acc_grads=tree.unflatten(accumulators),
            skip_state=Window.empty(accumulators),
        )

    def update(self, updates: Any, state: Any, params: Any = None, *, weight: Any = None, **extra):
        check_state(state)
        like = updates if params is None else params
        tree, paths = jax.tree.structure(like), _leaves.leaf_paths(like)
        grads = _leaves.leaves_up_to(tree, updates, paths, "gradients")
        accumulators = _leaves.leaves_up_to(tree, state.acc_grads, paths, "accumulators")
        _leaves.check_gradients(grads, accumulators, paths)
        with jax.named_scope(ACCUMULATE_SCOPE):
            accumulators, window = add_micro_step(
                accumulators, grads, state.skip_state, weight, skip_micro=self.nonfinite == "skip_micro"
            )
        taken = state.mini_step + 1
        every = self.every(state.gradient_step) if callable(self.every) else self.every
        return self._end(like, params, accumulators, window, state, taken, taken >= every, extra)

    def flush(self, state: Any, params: Any, extra: dict[str, Any]):
        check_state(state)
        tree, paths = jax.tree.structure(params), _leaves.leaf_paths(params)
        accumulators = _leaves.leaves_up_to(tree, state.acc_grads, paths, "accumulators")
        ends = state.mini_step > 0
        return self._end(params, params, accumulators, state.skip_state, state, state.mini_step, ends, extra)

    def _end(self, like, params, accumulators, window: Window, state, taken, ends, extra):
        """Updates and state after a call.

        Args:
          like: the tree whose structure and dtypes the updates take: the parameters, or the gradients without them.
          taken: calls in this window, this one included.
          ends: whether this call is the window's last.
        """
        leaves, tree = jax.tree.flatten(like)
        own = _leaves.only(leaves, _leaves.trained_leaves(like, self.trainable))

        def step(accumulators, inner_state, own):
            grads = [self._mean(acc, leaf, window) for acc, leaf in zip(accumulators, own, strict=True)]
            masks = _leaves.has_masks(inner_state)
            with jax.named_scope(OPTIMIZER_SCOPE):
                state_here = jax.tree.map(_to_device, inner_state)
                inner_params = None if params is None else tree.unflatten(own)
                updates, new_state = self.inner.update(tree.unflatten(grads), state_here, inner_params, **extra)
            given = zip(tree.flatten_up_to(updates), grads, accumulators, own, strict=True)
            updates = [_update(*leaf, handed_through=masks) for leaf in given]
            return updates, jax.tree.map(_back, new_state, inner_state)

        def wait(accumulators, inner_state, own):
            return jax.tree.map(_leaves.zero_update, own), inner_state

        # The cond does not return the accumulators, which would copy them. The next window's first call replaces them.
        stepped = ends & self._is_good(accumulators, window, taken, ends)
        updates, inner_state = jax.lax.cond(stepped, step, wait, accumulators, state.inner_opt_state, own)
        updates = [
            _leaves.zero_update(leaf) if _leaves.is_absent(update) else update
            for update, leaf in zip(updates, leaves, strict=True)
        ]
        return tree.unflatten(updates), optax.MultiStepsState(
            mini_step=jnp.where(ends, 0, taken),
            gradient_step=jnp.where(stepped, optax.safe_increment(state.gradient_step), state.gradient_step),
            inner_opt_state=inner_state,
            acc_grads=tree.unflatten(accumulators),
            skip_state=Window(
                window_weight=jnp.where(ends, 0, window.window_weight),
                left_out=jnp.where(ends, 0, window.left_out),
                skipped_windows=window.skipped_windows + (ends & ~stepped),
                updated=stepped,
            ),
        )

    def _mean(self, acc: Any, leaf: Any, window: Window) -> Any:
        """The gradient that the inner optimizer gets at the end of a window."""
        if _leaves.is_absent(leaf):
            return leaf
        if _leaves.is_absent(acc):  # the inner optimizer does not use this gradient
            return jnp.zeros_like(leaf, dtype=accumulator_dtype_of(leaf, self.accumulator_dtype))
        # In a window of total weight 0, acc is still that of the window before. The zero is -0.0: see zero_update.
        return jnp.where(window.window_weight == 0, _leaves.zero_update(acc), acc)

    def _is_good(self, accumulators: list, window: Window, taken, ends) -> jax.Array:
        """Whether the optimizer may step with the mean of a window that ends."""
        if self.nonfinite == "skip_window":  # one NaN or infinity in the window has made its mean so
            empty = window.window_weight == 0  # the accumulators still hold the window before

            def is_finite(accs):
                return empty | all_finite(accs, window.window_weight)

            # `| True` gives the other branch the same type under shard_map; it compiles to a constant.
            return jax.lax.cond(ends, is_finite, lambda accs: is_finite(accs) | True, jax.tree.leaves(accumulators))
        if self.nonfinite == "skip_micro":
            return window.left_out < taken
        return jnp.ones((), jnp.bool_)


def _update(update: Any, grad: Any, acc: Any, leaf: Any, *, handed_through: bool) -> Any:
    """The update of a leaf in the leaf's dtype, from the update of the inner optimizer."""
    if _leaves.is_absent(leaf):
        return leaf
    if handed_through and update is grad:  # optax.masked left the gradient alone; it is no update
        return _leaves.zero_update(leaf)
    update = _like(update, leaf)
    # An optimizer that does not use the gradient freezes a leaf by adding 0.0, which would turn -0.0 into 0.0.
    return jnp.where(update == 0, _leaves.zero_update(leaf), update) if _leaves.is_absent(acc) else update


def _like(new: Any, old: Any) -> Any:
    """`new` in the dtype of `old`, so that dtypes do not drift from step to step; keys stay unchanged."""
    dtype = jnp.result_type(old)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return new
    return jax.lax.convert_element_type(new, dtype)


def _to_device(leaf: Any) -> Any:
    """A leaf of the inner state on the device, moved there from host memory if it is kept there."""
    return jax.device_put(leaf, jax.memory.Space.Device) if _on_host(leaf) else leaf


def _back(new: Any, old: Any) -> Any:
    """The new leaf of the inner state in the dtype and memory space of the old one."""
    new = _like(new, old)
    return jax.device_put(new, jax.memory.Space.Host) if _on_host(old) else new


def _on_host(leaf: Any) -> bool:
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def _strong(leaf: Any) -> Any:
    """A leaf of the inner state with a strong type; a weak one would be lost in the first step and cost a retrace."""
    weak = isinstance(leaf, (bool, int, float, complex)) or getattr(leaf, "weak_type", False)
    return jax.lax.convert_element_type(leaf, jnp.result_type(leaf)) if weak else leaf
