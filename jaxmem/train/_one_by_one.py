"""The reference without any scan: plain gradients of each micro-batch, one after another, added up on the host."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import accumulate
from jaxmem.config import MemoryConfig
from jaxmem.objective import LossOutput, Objective, Sum, WeightedMean, terms_of
from jaxmem.train._gradients import Outcome, checked_room, keep_gradients, start_state, to_host
from jaxmem.train._loss import configured_loss, partition, state_reductions
from jaxmem.train._spec import StepSpec
from jaxmem.train._state import TrainState
from jaxmem.train._step import TrainStep


def run_one_by_one(step: TrainStep, batch: Any, given: TrainState | None, rng: Any, limit_bytes: int | None) -> Outcome:
    """Plain float32 gradients of each micro-batch, one after another in Python, averaged by their weights.

    The micro-batches are those of `step`, on its mesh. The sum over them is taken here, in float64: neither jaxmem's
    scan nor its weights pre-pass is used.

    Raises:
      TooLarge: a micro-batch would take more than `limit_bytes`.
    """
    steps, workload = step.config.accumulation_steps, step.workload
    keeping = dataclasses.replace(workload, optimizer=keep_gradients(), batch=batch)
    config = MemoryConfig(generator=step.config.generator)
    plain = TrainStep(StepSpec.of(keeping, config, step.spec.mesh_here))
    whole = jax.tree.map(_unplaced, batch)  # so that rows can be cut whatever they are sharded over
    micros = [
        plain.spec.put(accumulate.micro_batch(whole, index, steps, batch_axes=workload.batch_axes), uneven=True)
        for index in range(steps)
    ]
    state = start_state(plain, given, rng)
    trainable, frozen = partition(state.params, workload.trainable)
    loss = configured_loss(workload, config, frozen)
    terms = []
    with plain.spec.entered():
        key = jax.random.fold_in(state.rng, state.window)
        keys = [jax.random.fold_in(key, index) for index in range(steps)]
        rules = _rules(loss, trainable, micros[0], key, state.state)
        for term in range(len(rules)):
            jitted = jax.jit(accumulate.value_and_grad(_only(loss, term), 1))
            lowered = jitted.lower(trainable, micros[0], rng=key, state=state.state)
            terms.append(checked_room(lowered.compile(compiler_options=workload.compiler_options), limit_bytes))
    sums = [_WeightedSum() for _ in rules]
    names = jax.tree.broadcast(state_reductions(workload, state.state), state.state)
    carried, states = state.state, []
    for batch, rng in zip(micros, keys, strict=True):
        seen = jax.tree.map(lambda now, start, name: now if name == "carry" else start, carried, state.state, names)
        micro = [term(trainable, batch, rng=rng, state=seen) for term in terms]
        for total, rule, out in zip(sums, rules, micro, strict=True):
            total.add(out, float(out.weights[0]) if rule == "weighted" else 1.0)
        carried = micro[0].state
        states.append(to_host(carried))
    parts = [total.result(divide=rule != "sum") for total, rule in zip(sums, rules, strict=True)]
    gradients = jax.tree.map(lambda *leaves: sum(leaves), *(gradient for _, gradient in parts))
    return Outcome(
        loss=sum(value for value, _ in parts),
        gradients=gradients,
        state=_combined(to_host(state.state), states, names),
    )


def _unplaced(leaf: Any) -> Any:
    """A leaf of a batch without the mesh that it lies on."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jnp.asarray(np.asarray(jax.random.key_data(leaf))), impl=jax.random.key_impl(leaf)
        )
    return np.asarray(leaf)


def _combined(start: Any, states: list[Any], names: Any) -> Any:
    """The states of micro-batches together, by the reduction of each leaf."""

    def combine(start, name, *leaves):
        if name == "mean":
            return np.mean(np.stack(leaves).astype(np.float64), 0).astype(start.dtype)
        if name == "sum":
            return start + sum(leaf - start for leaf in leaves)
        return np.max(np.stack(leaves), 0) if name == "max" else leaves[-1]

    return jax.tree.map(combine, start, names, *states)


_RULES = {Sum: "sum", WeightedMean: "weighted"}


def _rules(loss, trainable, batch, rng, state) -> list[str]:
    """How the micro-batches of each term combine: "weighted", "mean" or "sum"."""
    found: list[str] = []

    def trace(*args):
        trainable, batch, rng, state = args
        terms = terms_of(loss(trainable, batch, rng=rng, state=state))
        found[:] = [_RULES[type(term)] if isinstance(term, Objective) else "mean" for _, term in terms]

    jax.eval_shape(trace, trainable, batch, rng, state)
    return found


def _only(loss, index: int):
    """The loss with one term of its objective, and no metrics."""

    def one(trainable, batch, *, rng, state):
        output = loss(trainable, batch, rng=rng, state=state)
        factor, term = terms_of(output)[index]
        objective = term * factor
        return LossOutput(objective, state=output.state) if isinstance(output, LossOutput) else objective

    return one


class _WeightedSum:
    """Sums of values and gradients times weights, on the host in float64."""

    def __init__(self):
        self.weight = self.value = 0.0
        self.gradients = None

    def add(self, out: accumulate.Gradients, weight: float) -> None:
        scaled = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64) * weight, out.grads)
        self.gradients = scaled if self.gradients is None else jax.tree.map(np.add, self.gradients, scaled)
        self.value += float(out.value) * weight
        self.weight += weight

    def result(self, *, divide: bool) -> tuple[float, Any]:
        """The mean, or the sum; a total weight of zero gives zero."""
        by = (self.weight or 1.0) if divide else 1.0
        return self.value / by, jax.tree.map(lambda leaf: leaf / by, self.gradients)
