"""Runs steps for their gradients: the real step with an optimizer that keeps them, and a reference without any scan."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem import accumulate, precision
from jaxmem._compat import prune
from jaxmem._units import format_bytes
from jaxmem.config import MemoryConfig
from jaxmem.errors import WorkloadError
from jaxmem.objective import LossOutput, Objective, Sum
from jaxmem.targets import read_back, resolve_target
from jaxmem.train._loss import configured_loss, merge, partition, state_reductions
from jaxmem.train._spec import StepSpec
from jaxmem.train._state import TrainState, check_alive, check_state
from jaxmem.train._step import TrainStep
from jaxmem.workload import path_string

_MEMORY_INFO = Path("/proc/meminfo")


class TooLarge(Exception):
    """A step that this machine has not the memory to run; says so in one sentence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a step computed, on the host: gradients of the trainable parameters, the new model state, the loss."""

    loss: float
    gradients: Any
    state: Any


def run_step(step: TrainStep, batch: Any, given: TrainState | None, rng: Any, limit_bytes: int | None) -> Outcome:
    """The step itself, on this machine, its optimizer replaced by one that keeps the gradients.

    Args:
      batch: arrays.
      given: a state whose parameters, model state and key to use; None makes them from `rng`.
      limit_bytes: what it may take; None for no limit.

    Raises:
      TooLarge: it would take more.
    """
    keeping = dataclasses.replace(step.workload, optimizer=_keep_gradients(), batch=batch)
    # Gradients are kept as they come, not as optimizer state is stored.
    dtypes = dataclasses.replace(step.config.dtypes, optimizer=None)
    remat = step.config.remat if step.decision is None else "none"
    spec = StepSpec.of(keeping, dataclasses.replace(step.config, precision=dtypes, remat=remat), step.spec.mesh_here)
    kept = TrainStep(spec if step.decision is None else spec.with_decision(step.decision))
    shapes = jax.tree.leaves(kept.abstract_state())
    # Parameters and gradients, that is; known before anything is compiled.
    _check_room(sum(leaf.size * leaf.dtype.itemsize for leaf in shapes), limit_bytes)
    compiled = _checked(kept.compile(), limit_bytes)
    state, batch = _state(kept, given, rng), kept.spec.put(batch)
    window = int(state.window)
    state, metrics = compiled(state, batch)
    # A skipped window keeps no gradients: the same one again, as long as the scale backs off.
    while state.loss_scale is not None and not bool(state.last_finite):
        if float(state.loss_scale.scale) == float(metrics["loss_scale"]):
            break
        state, metrics = compiled(dataclasses.replace(state, window=jnp.int32(window)), batch)
    return Outcome(
        loss=float(metrics["loss"]), gradients=_to_host(state.opt_state["gradients"]), state=_to_host(state.state)
    )


def run_one_by_one(step: TrainStep, batch: Any, given: TrainState | None, rng: Any, limit_bytes: int | None) -> Outcome:
    """Plain float32 gradients of each micro-batch, one after another in Python, averaged by their weights.

    The micro-batches are those of `step`, on its mesh. The sum over them is taken here, in float64: neither jaxmem's
    scan nor its weights pre-pass is used.

    Raises:
      TooLarge: a micro-batch would take more than `limit_bytes`.
    """
    steps, workload = step.config.accumulation_steps, step.workload
    keeping = dataclasses.replace(workload, optimizer=_keep_gradients(), batch=batch)
    plain = TrainStep(StepSpec.of(keeping, MemoryConfig(), step.spec.mesh_here))
    whole = jax.tree.map(_unplaced, batch)  # so that rows can be cut whatever they are sharded over
    micros = [
        plain.spec.put(accumulate.micro_batch(whole, index, steps, batch_axes=workload.batch_axes), uneven=True)
        for index in range(steps)
    ]
    state = _state(plain, given, rng)
    trainable, frozen = partition(state.params, workload.trainable)
    loss = configured_loss(workload, MemoryConfig(), frozen)
    terms = []
    with plain.spec.entered():
        key = jax.random.fold_in(state.rng, state.window)
        keys = [jax.random.fold_in(key, index) for index in range(steps)]
        rules = _rules(loss, trainable, micros[0], key, state.state)
        for term in range(len(rules)):
            jitted = jax.jit(accumulate.value_and_grad(_only(loss, term), 1))
            lowered = jitted.lower(trainable, micros[0], rng=key, state=state.state)
            terms.append(_checked(lowered.compile(compiler_options=workload.compiler_options), limit_bytes))
    sums = [_WeightedSum() for _ in rules]
    names = jax.tree.broadcast(state_reductions(workload, state.state), state.state)
    carried, states = state.state, []
    for batch, rng in zip(micros, keys, strict=True):
        seen = jax.tree.map(lambda now, start, name: now if name == "carry" else start, carried, state.state, names)
        micro = [term(trainable, batch, rng=rng, state=seen) for term in terms]
        for total, rule, out in zip(sums, rules, micro, strict=True):
            total.add(out, float(out.weights[0]) if rule == "weighted" else 1.0)
        carried = micro[0].state
        states.append(_to_host(carried))
    parts = [total.result(divide=rule != "sum") for total, rule in zip(sums, rules, strict=True)]
    gradients = jax.tree.map(lambda *leaves: sum(leaves), *(gradient for _, gradient in parts))
    return Outcome(
        loss=sum(value for value, _ in parts),
        gradients=gradients,
        state=_combined(_to_host(state.state), states, names),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainLoss:
    """What a trace of the plain loss says.

    Args:
      separable: whether micro-batches can be expected to add up to the whole batch: no model state, no random numbers.
      narrow: the narrow floating dtypes that it computes in of its own accord.
    """

    separable: bool
    narrow: frozenset[str]

    @classmethod
    def of(cls, step: TrainStep, batch: Any) -> "PlainLoss":
        """Traces the loss of a step's workload once, forward only."""
        workload = dataclasses.replace(step.workload, batch=batch)
        plain = StepSpec.of(workload, MemoryConfig(), step.spec.mesh_here)
        trainable, frozen, batch, rng, state = plain.loss_arguments()
        loss = configured_loss(workload, MemoryConfig())

        def values(rng, trainable, frozen, batch, rest):
            return jax.tree.leaves(loss(merge(trainable, frozen), batch, rng=rng, state=rest))

        with plain.entered():
            jaxpr = jax.make_jaxpr(values)(rng, trainable, frozen, batch, state)
        _, used = prune(jaxpr, [True] * len(jaxpr.jaxpr.outvars))
        narrow = (name for name in ("bfloat16", "float16") if precision.uses_dtype(jaxpr.jaxpr, jnp.dtype(name)))
        return cls(separable=not used[0] and not jax.tree.leaves(state), narrow=frozenset(narrow))


def fill_batch(batch: Any, rng: Any) -> tuple[Any, bool]:
    """The batch as arrays, and whether some were made up: normal numbers, integers of 0 and 1, random bools.

    Raises:
      WorkloadError: a leaf of another dtype that is only a shape.
    """
    made = False

    def fill(path, leaf):
        nonlocal made
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            return jnp.asarray(leaf)
        made = True
        key = jax.random.fold_in(rng, sum(map(ord, path_string(path))))
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            return jax.random.normal(key, leaf.shape, jnp.float32).astype(leaf.dtype)
        if jnp.issubdtype(leaf.dtype, jnp.integer) or leaf.dtype == jnp.bool_:
            return jax.random.bernoulli(key, 0.5, leaf.shape).astype(leaf.dtype)
        raise WorkloadError(
            wanted="a batch of arrays to compare gradients on, or shapes that can be filled with random numbers",
            got=f"only a shape of {leaf.dtype} at {path_string(path, root='batch')}",
            do="Pass verify(step, batch=...) a real batch.",
        )

    return jax.tree_util.tree_map_with_path(fill, batch), made


def available_bytes() -> int | None:
    """Memory that is free on the local device, or on this machine; None where unknown."""
    limit = resolve_target("local").memory_bytes
    if jax.default_backend() != "cpu":
        return limit
    try:
        free = dict(line.split(":", 1) for line in _MEMORY_INFO.read_text().splitlines())
        return min(int(free["MemAvailable"].split()[0]) * 1024, limit or 2**63)
    except (OSError, KeyError, ValueError):  # not Linux
        return limit


def _keep_gradients() -> optax.GradientTransformation:
    """Leaves parameters as they are; its state is the last gradient."""

    def init(params):
        return {"gradients": jax.tree.map(jnp.zeros_like, params)}

    def update(updates, state, params=None):
        del state, params
        return jax.tree.map(jnp.zeros_like, updates), {"gradients": updates}

    return optax.GradientTransformation(init, update)


def _state(step: TrainStep, given: TrainState | None, rng: Any) -> TrainState:
    """A state of `step`: its own parameters, or copies of those given, since the step donates them."""
    state = step.init(rng)
    if given is None:
        return state
    check_alive(given)
    check_state(step.abstract_state(), dataclasses.replace(given, opt_state=state.opt_state))
    params = jax.tree.map(lambda leaf, like: jnp.array(leaf, like.dtype), given.params, state.params)
    rest, key = jax.tree.map(jnp.copy, (given.state, given.rng))
    return dataclasses.replace(state, params=params, state=rest, rng=key, window=jnp.copy(given.window))


def _checked(compiled: jax.stages.Compiled, limit_bytes: int | None) -> jax.stages.Compiled:
    """`compiled` again; TooLarge where it needs more than the limit."""
    stats, _ = read_back(lambda: compiled.memory_analysis())
    if stats is not None:
        needed = stats.argument_size_in_bytes + stats.output_size_in_bytes + stats.temp_size_in_bytes
        _check_room(needed - stats.alias_size_in_bytes, limit_bytes)
    return compiled


def _check_room(needed: int, limit: int | None) -> None:
    if limit is not None and needed > limit:
        raise TooLarge(
            f"running the step takes {format_bytes(needed)}, and this machine has {format_bytes(limit)} to spare"
        )


def _to_host(tree: Any) -> Any:
    def move(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)

    return jax.tree.map(move, tree)


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


def _terms(output: Any) -> tuple[tuple[Any, Any], ...]:
    objective = output.objective if isinstance(output, LossOutput) else output
    return tuple(objective.terms()) if isinstance(objective, Objective) else ((1.0, objective),)


def _rules(loss, trainable, batch, rng, state) -> list[str]:
    """How the micro-batches of each term combine: "weighted", "mean" or "sum"."""
    found: list[str] = []

    def trace(*args):
        trainable, batch, rng, state = args
        terms = _terms(loss(trainable, batch, rng=rng, state=state))
        found[:] = [
            "sum" if isinstance(term, Sum) else "weighted" if isinstance(term, Objective) else "mean"
            for _, term in terms
        ]

    jax.eval_shape(trace, trainable, batch, rng, state)
    return found


def _only(loss, index: int):
    """The loss with one term of its objective, and no metrics."""

    def one(trainable, batch, *, rng, state):
        output = loss(trainable, batch, rng=rng, state=state)
        factor, term = _terms(output)[index]
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
