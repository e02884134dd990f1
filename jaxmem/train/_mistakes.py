"""Errors of JAX, optax and flax that come from what the user gave a step, as errors that say so; others stay."""

import contextlib
import dataclasses
import os
import traceback
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from jaxmem._blame import is_own_fault, named, users_frame
from jaxmem.errors import BatchError, JaxmemError, StateError, WorkloadError
from jaxmem.objective import LossOutput, Objective
from jaxmem.train._loss import merge, partition
from jaxmem.train._state import TrainState
from jaxmem.workload import call_loss, declares, path_string

if TYPE_CHECKING:
    from jaxmem.train._step import TrainStep


def guarded(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """An optimizer that raises WorkloadError where the user's own raises, or returns what cannot be applied."""
    inner = optax.with_extra_args_support(optimizer)

    def init(params):
        with _blamed(
            "an optimizer whose init takes the trainable parameters", "Look for labels and masks of other paths."
        ):
            return inner.init(params)

    def update(updates, state, params=None, **extra):
        with _blamed(
            "an optimizer whose update takes (gradients, state, params, value=loss)",
            "One that calls the loss by itself, such as optax.lbfgs, cannot be used: micro-batches need the gradients.",
        ):
            made = inner.update(updates, state, params, **extra)
        if not isinstance(made, tuple) or len(made) != 2:
            raise WorkloadError(
                wanted="an optimizer whose update returns (updates, state)",
                got=f"a {type(made).__name__}",
                do="Return both.",
            )
        new, after = made
        different = _difference(updates, new, "updates", dtypes=False)  # its state may grow, as optax.monitor's does
        if different:
            raise WorkloadError(
                wanted="an optimizer whose update returns updates with the structure and shapes of the parameters",
                got=different,
                do="Return (updates, state), the updates as they came.",
            )
        return new, after

    return optax.GradientTransformationExtraArgs(init, update)


@contextlib.contextmanager
def blaming(step: "TrainStep", state: Any = None, batch: Any = None) -> Iterator[None]:
    """An error within is explained by what was given, if that is at fault; else it stays what it is.

    At fault is a state or a batch that is not the workload's, and a loss that JAX alone, without any of jaxmem's
    machinery, refuses to trace or to differentiate. An error in the user's own code already names its line.

    Args:
      step: what is called or traced.
      state, batch: what it is called with.
    """
    try:
        yield
    except (JaxmemError, jax.errors.JaxRuntimeError, FloatingPointError):  # what fails when it runs took the state
        raise
    except Exception as error:
        if state is not None:
            check_alive(state, error)
            check_state(step, state, error)
        if batch is not None:
            _check_batch(step, batch, error)
        if users_frame(error) is None:
            _check_loss(step, error)
        raise


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


def check_state(step: "TrainStep", state: Any, error: BaseException | None = None) -> None:
    """StateError for a state that has other leaves, or leaves of other shapes, than the step's own."""
    if not isinstance(state, TrainState):
        raise StateError(
            wanted="a TrainState, as step.init() makes it", got=f"a {type(state).__name__}", do="Call step.init()."
        ) from error
    own = step.abstract_state()
    # What a missing loss scale means is said where it is used; an optimizer's state may grow, as optax.monitor's does.
    rest = {"loss_scale": None, "opt_state": None}
    wanted, given = (dataclasses.replace(tree, **rest) for tree in (own, state))
    different = _difference(wanted, given, "state", dtypes=True) or _difference(
        own.opt_state, state.opt_state, "state/opt_state", dtypes=False, more=True
    )
    if different:
        raise StateError(
            wanted="a state of this step's workload and config",
            got=different,
            do="Make one with step.init(); one restored from a file must be of the same model and optimizer.",
        ) from error


def _check_batch(step: "TrainStep", batch: Any, error: BaseException) -> None:
    different = _difference(step.abstract_batch(), batch, "batch", dtypes=True)
    if different:
        raise BatchError(
            wanted="a batch like the workload's example batch",
            got=f"{different}; which ends in {_described(error)}",
            do="Correct the batch, or give the Workload an example like it.",
        ) from error


def _check_loss(step: "TrainStep", error: BaseException) -> None:
    """WorkloadError if JAX alone refuses the loss: whole batch, no config, no micro-batches."""
    workload = step.workload
    if declares(workload.loss_fn, "memory"):
        return  # its blocks are jaxmem's business
    try:
        state, batch = step.abstract_state(), step.abstract_batch()
    except Exception:
        return
    trainable, frozen = partition(state.params, workload.trainable)

    def total(trainable, frozen, batch, rng, rest):
        out = call_loss(workload.loss_fn, merge(trainable, frozen), batch, rng=rng, state=rest)
        out = out.objective if isinstance(out, LossOutput) else out
        terms = [term for _, term in out.terms()] if isinstance(out, Objective) else [out]
        return sum(jnp.sum(leaf) for term in terms for leaf in jax.tree.leaves(term)[:1])

    for fn, what in ((total, "trace"), (jax.grad(total), "differentiate")):
        try:
            with step.entered():
                jax.eval_shape(fn, trainable, frozen, batch, state.rng, state.state)
        except Exception as alone:
            if type(alone) is not type(error):
                return
            raise WorkloadError(
                wanted=f"a loss that JAX can {what}", got=_described(alone), do="JAX alone refuses it in the same way."
            ) from error


@contextlib.contextmanager
def _blamed(wanted: str, do: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        called = traceback.extract_tb(error.__traceback__)[-1].filename == __file__  # what cannot be called like this
        if isinstance(error, JaxmemError) or (is_own_fault(error) and not called):  # such as of multi_steps
            raise
        raise WorkloadError(wanted=wanted, got=_described(error), do=do) from error


def _described(error: BaseException) -> str:
    """What an error says, and where in the user's code it was raised, if it was."""
    frame = users_frame(error)
    where = f" ({os.path.basename(frame.filename)}, line {frame.lineno})" if frame else ""
    return f"{named(error, 400).rstrip('.')}{where}"


def _difference(wanted: Any, got: Any, root: str, *, dtypes: bool, more: bool = False) -> str:
    """The first leaf in which two trees differ, in words; empty if they do not, or if `got` only has `more`."""
    wanted, got = (
        {path_string(path, root=root): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}
        for tree in (wanted, got)
    )
    for path in [*wanted, *got]:
        if path not in got:
            return f"no {path}"
        if path not in wanted and more:
            continue
        if path not in wanted:
            return f"{path}, which should not be there"
        shapes = [jnp.shape(leaf) for leaf in (wanted[path], got[path])]
        if shapes[0] != shapes[1]:
            return f"shape {shapes[1]} instead of {shapes[0]} at {path}"
        kinds = [_plain_dtype(leaf) if dtypes else None for leaf in (wanted[path], got[path])]
        if kinds[0] != kinds[1]:
            return f"{kinds[1]} instead of {kinds[0]} at {path}"
    return ""


def _plain_dtype(leaf: Any) -> Any:
    """As JAX computes with it; None for keys, of which any kind will do."""
    dtype = jnp.result_type(leaf)
    return None if jnp.issubdtype(dtype, jax.dtypes.extended) else jax.dtypes.canonicalize_dtype(dtype)
