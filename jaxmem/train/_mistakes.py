"""Errors of JAX, optax and flax that come from what the user gave a step, as errors that say so; others stay."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._blame import users_frame, where_raised
from jaxmem._cell import shortening
from jaxmem._signatures import call_loss, declares
from jaxmem.accumulate._trace import term_of
from jaxmem.errors import BatchError, JaxmemError, ObjectiveError, WorkloadError
from jaxmem.objective import terms_of
from jaxmem.train._leaves import first_difference
from jaxmem.train._loss import merge, partition
from jaxmem.train._spec import StepSpec
from jaxmem.train._state import check_alive, check_state
from jaxmem.train._update import abstract_state


@contextlib.contextmanager
def blaming(spec: StepSpec, state: Any = None, batch: Any = None) -> Iterator[None]:
    """An error within is explained by what was given, if that is at fault; else it stays what it is.

    At fault is a state or a batch that is not the workload's, and a loss that JAX alone, without any of jaxmem's
    machinery, refuses to trace or to differentiate. An error in the user's own code already names its line.

    Args:
      spec: of the step that is called or traced.
      state, batch: what it is called with.
    """
    try:
        with shortening():
            yield
    except (JaxmemError, jax.errors.JaxRuntimeError, FloatingPointError):  # what fails when it runs took the state
        raise
    except Exception as error:
        if state is not None:
            check_alive(state, error)
            check_state(abstract_state(spec), state, error)
        if batch is not None:
            _check_batch(spec, batch, error)
        if users_frame(error) is None:
            _check_loss(spec, error)
        raise


def _check_batch(spec: StepSpec, batch: Any, error: BaseException) -> None:
    different = first_difference(spec.abstract_batch(), batch, "batch", dtypes=True)
    if different:
        raise BatchError(
            wanted="a batch like the workload's example batch",
            got=f"{different}; which ends in {where_raised(error)}",
            do="Correct the batch, or give the Workload an example like it.",
        ) from error


def _check_loss(spec: StepSpec, error: BaseException) -> None:
    """WorkloadError if JAX alone refuses the loss: whole batch, no config, no micro-batches."""
    workload = spec.workload
    if declares(workload.loss_fn, "memory"):
        return  # its blocks are jaxmem's business
    try:
        (params, state, rng), batch = spec.abstract_model(), spec.abstract_batch()
    except Exception:
        return
    trainable, frozen = partition(params, workload.trainable)

    def total(trainable, frozen, batch, rng, rest):
        out = call_loss(workload.loss_fn, merge(trainable, frozen), batch, rng=rng, state=rest)
        return sum(jnp.sum(term_of(*each).total) for each in terms_of(out))

    for fn, what in ((total, "trace"), (jax.grad(total), "differentiate")):
        try:
            with spec.entered():
                jax.eval_shape(fn, trainable, frozen, batch, rng, state)
        except ObjectiveError as alone:
            raise alone from error
        except Exception as alone:
            if type(alone) is not type(error):
                return
            raise WorkloadError(
                wanted=f"a loss that JAX can {what}",
                got=where_raised(alone),
                do="JAX alone refuses it in the same way.",
            ) from error
