"""The optimizer of a step: the user's own, guarded, its state stored in the config's dtype."""

import contextlib
import traceback
from collections.abc import Iterator
from typing import Any

import optax

from jaxmem import precision
from jaxmem._blame import is_own_fault, where_raised
from jaxmem.errors import JaxmemError, WorkloadError
from jaxmem.train._leaves import first_difference
from jaxmem.train._spec import StepSpec


def optimizer_of(spec: StepSpec) -> optax.GradientTransformationExtraArgs:
    """What a step of the spec updates its trainable parameters with."""
    dtype, own = spec.config.dtypes.optimizer, guarded(spec.workload.optimizer)
    return own if dtype is None else precision.store_state_in(own, dtype)


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
        different = first_difference(
            updates, new, "updates", dtypes=False
        )  # its state may grow, as optax.monitor's does
        if different:
            raise WorkloadError(
                wanted="an optimizer whose update returns updates with the structure and shapes of the parameters",
                got=different,
                do="Return (updates, state), the updates as they came.",
            )
        return new, after

    return optax.GradientTransformationExtraArgs(init, update)


@contextlib.contextmanager
def _blamed(wanted: str, do: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        called = traceback.extract_tb(error.__traceback__)[-1].filename == __file__  # what cannot be called like this
        if isinstance(error, JaxmemError) or (is_own_fault(error) and not called):  # such as of multi_steps
            raise
        raise WorkloadError(wanted=wanted, got=where_raised(error), do=do) from error
