"""The transformation behind `multi_steps`: what happens at each call, and at the end of a window."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem._scopes import ACCUMULATE_SCOPE, OPTIMIZER_SCOPE
from jaxmem.accumulate import _multi_steps_leaves as _leaves
from jaxmem.accumulate._multi_steps_window import Window, add_micro_step, all_finite, check_state
from jaxmem.accumulate._reduce import accumulator_dtype_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultiSteps:
    """What `multi_steps` was asked for; its bound methods are the transformation."""

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
        """Updates and state after a call, of which `ends` says whether it was the window's last.

        Args:
          like: the tree whose structure and dtypes the updates take: the parameters, or the gradients if not given.
          taken: calls in this window, this one included.
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

        # The accumulators are no output of this: they would be copied. The next window's first call replaces them.
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
        if _leaves.is_absent(acc):  # nothing will come of it
            return jnp.zeros_like(leaf, dtype=accumulator_dtype_of(leaf, self.accumulator_dtype))
        # Where nothing weighed anything, acc is an old one. Not with a zero of +0.0: see zero_update.
        return jnp.where(window.window_weight == 0, _leaves.zero_update(acc), acc)

    def _is_good(self, accumulators: list, window: Window, taken, ends) -> jax.Array:
        """Whether the mean of a window that ends may be stepped with."""
        if self.nonfinite == "skip_window":  # whatever was not finite in the window has made its mean so: one look
            empty = window.window_weight == 0  # then the accumulators still hold the window before

            def look(accs):
                return empty | all_finite(accs, window.window_weight)

            # The other branch is True, in a way that gives both the same type under shard_map; it compiles to nothing.
            return jax.lax.cond(ends, look, lambda accs: look(accs) | True, jax.tree.leaves(accumulators))
        if self.nonfinite == "skip_micro":
            return window.left_out < taken
        return jnp.ones((), jnp.bool_)


def _update(update: Any, grad: Any, acc: Any, leaf: Any, *, handed_through: bool) -> Any:
    """The update of a leaf in its own dtype, from what the inner optimizer made of its gradient."""
    if _leaves.is_absent(leaf):
        return leaf
    if handed_through and update is grad:  # no update, but what optax.masked left alone
        return _leaves.zero_update(leaf)
    update = _like(update, leaf)
    # An optimizer that reads no gradient freezes a leaf by 0.0, which would make 0.0 of -0.0.
    return jnp.where(update == 0, _leaves.zero_update(leaf), update) if _leaves.is_absent(acc) else update


def _like(new: Any, old: Any) -> Any:
    """`new` in the dtype of `old`, so that no dtype drifts from step to step; keys as they are."""
    dtype = jnp.result_type(old)
    if jnp.issubdtype(dtype, jax.dtypes.extended):
        return new
    return jax.lax.convert_element_type(new, dtype)


def _to_device(leaf: Any) -> Any:
    """A leaf of the inner state that is kept in host memory, brought to where it can be computed with."""
    return jax.device_put(leaf, jax.memory.Space.Device) if _on_host(leaf) else leaf


def _back(new: Any, old: Any) -> Any:
    """A new leaf of the inner state in the dtype and the memory of the old one."""
    new = _like(new, old)
    return jax.device_put(new, jax.memory.Space.Host) if _on_host(old) else new


def _on_host(leaf: Any) -> bool:
    return jax.typeof(leaf).memory_space == jax.memory.Space.Host


def _strong(leaf: Any) -> Any:
    """A leaf of the inner state without a weak type, which the first step would take away, and so cost a retrace."""
    weak = isinstance(leaf, (bool, int, float, complex)) or getattr(leaf, "weak_type", False)
    return jax.lax.convert_element_type(leaf, jnp.result_type(leaf)) if weak else leaf
