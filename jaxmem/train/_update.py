"""One optimizer step of a spec, pure: `(state, batch) -> (state, metrics)`; and the state that it begins with."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxmem import accumulate, precision
from jaxmem._scopes import OPTIMIZER_SCOPE
from jaxmem._trainable import select_paths
from jaxmem.train import _gathers, _order, _random, _reduction, _remat, _roll, _skip
from jaxmem.train._lever import with_own_metrics
from jaxmem.train._loss import check_precision, merge, partition, state_reductions
from jaxmem.train._optimizer import optimizer_of
from jaxmem.train._spec import StepSpec, like_given, with_sharding
from jaxmem.train._state import TrainState, check_state
from jaxmem.workload import is_creator

# In the order in which they stand round the update, the innermost first.
LEVERS = tuple(lever.LEVER for lever in (_random, _gathers, _roll, _order, _reduction, _remat, _skip))


class StepOutput(tuple):
    """`(state, metrics)`, and how gradients were added, which holds no arrays: that of a trace tells it."""

    added: accumulate.Added | None = None

    @classmethod
    def of(cls, added: accumulate.Added | None, children: Iterable[Any]) -> "StepOutput":
        made = cls(children)
        made.added = added
        return made


jax.tree_util.register_pytree_node(StepOutput, lambda output: (tuple(output), output.added), StepOutput.of)


def make_update(spec: StepSpec) -> Callable[[TrainState, Any], StepOutput]:
    """The step as it is traced: `(state, batch) -> (state, metrics)`."""
    workload, dtypes = spec.workload, spec.config.dtypes

    # Nested, since JAX names its own operations by the functions that call them, and reports take a name for a layer.
    def update(state: TrainState, batch: Any, *, loss_scale: jax.Array | None = None, **options: Any):
        trainable, frozen = partition(state.params, workload.trainable)
        gradients = accumulate.value_and_grad(
            spec.loss(frozen),
            spec.config.accumulation_steps,
            accumulator_dtype=dtypes.accumulator,
            batch_axes=workload.batch_axes,
            state_reduction=state_reductions(workload, state.state),
            check_mean=False,  # `assert_equivalent` and `verify` tell, with the leaf
            **options,
        )
        rng = jax.random.fold_in(state.rng, state.window)
        out = gradients(trainable, batch, rng=rng, state=state.state, loss_scale=loss_scale)
        # Optimizers that adapt to the loss (optax.contrib.reduce_on_plateau, …) take it as `value`; others ignore it.
        with jax.named_scope(OPTIMIZER_SCOPE):
            updates, opt_state = optimizer_of(spec).update(out.grads, state.opt_state, trainable, value=out.value)
            trained = optax.apply_updates(trainable, updates)
        new = dataclasses.replace(
            state,
            step=state.step + 1,
            window=state.window + 1,
            last_finite=jnp.isfinite(out.value),
            params=merge(trained, frozen),
            opt_state=opt_state,
            state=out.state,
            loss_scale=None,
        )
        metrics = with_own_metrics(out.metrics, loss=out.value)
        return new, out, metrics if dtypes.output is None else precision.cast_floating(metrics, dtypes.output)

    for lever in LEVERS:
        update = lever.around(spec, update)

    def step(state: TrainState, batch: Any) -> StepOutput:
        check_state(abstract_state(spec), state)
        check_precision(workload, spec.config, state, batch)
        new, out, metrics = update(state, batch)
        if spec.layout.mesh is not None:
            new = spec.layout.constrain(new, shardings(spec))
            metrics = spec.layout.readable(metrics)
        return StepOutput.of(out.added, (new, metrics))

    return step


def new_state(spec: StepSpec, given: list[Any], rng: Any) -> TrainState:
    """The state that training begins with, of the workload's parameters and model state as `spec.given()` has them."""
    params, rest = spec.new_model(given, rng)
    trainable, _ = partition(params, spec.workload.trainable)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        window=jnp.zeros((), jnp.int32),
        skipped=jnp.zeros((), jnp.int32),
        last_finite=jnp.ones((), jnp.bool_),
        params=params,
        opt_state=optimizer_of(spec).init(trainable),
        state=rest,
        loss_scale=None,
        rng=rng,
    )
    for lever in LEVERS:
        state = lever.state(spec, state)
    return state


def abstract_state(spec: StepSpec) -> TrainState:
    """Shapes and dtypes of the state that `new_state` makes."""
    return jax.eval_shape(functools.partial(new_state, spec), *spec.abstract_given())


def abstract_arguments(spec: StepSpec) -> tuple[TrainState, Any]:
    """Shapes of state and example batch with the shardings of what the workload was given."""
    state = _given_state(spec)
    batch = like_given(spec.abstract_batch(), spec.workload.batch)
    if spec.layout.mesh is None:
        return state, batch
    state = jax.tree.map(with_sharding, state, shardings(spec))
    return state, jax.tree.map(with_sharding, batch, spec.layout.batch(batch))


def shardings(spec: StepSpec) -> TrainState:
    """Where each leaf of the state lies on the mesh of the step."""
    placed = spec.layout.state(_given_state(spec))
    for lever in LEVERS:
        placed = lever.shardings(spec, placed)
    return placed


def _given_state(spec: StepSpec) -> TrainState:
    state = abstract_state(spec)
    params, rest = (like_given(*pair) for pair in zip((state.params, state.state), spec.given(), strict=True))
    return dataclasses.replace(state, params=params, state=rest)


def idle_settings(spec: StepSpec) -> tuple[str, ...]:
    """One sentence for each setting that does nothing for the workload; nothing is traced for it."""
    workload = spec.workload
    found = [sentence for lever in LEVERS for sentence in lever.idle(spec)]
    if workload.state is None and workload.state_reduction != "carry":
        found.append("state_reduction does nothing, as the workload has no state: pass state=, or leave it out.")
    if isinstance(workload.trainable, str) and not is_creator(workload.params):
        chosen = jax.tree.leaves(select_paths(workload.params, workload.trainable))
        if chosen and all(chosen):
            found.append(f"trainable={workload.trainable!r} picks every parameter, as leaving it out does.")
    return tuple(found)
