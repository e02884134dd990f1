"""Runs a step for its gradients, with an optimizer that keeps them; and what a trace of the plain loss tells."""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxmem import precision
from jaxmem._compat import prune
from jaxmem._units import format_bytes
from jaxmem.config import MemoryConfig
from jaxmem.errors import WorkloadError
from jaxmem.targets import read_back, resolve_target
from jaxmem.train._loss import configured_loss, merge
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
    keeping = dataclasses.replace(step.workload, optimizer=keep_gradients(), batch=batch)
    # Gradients are kept as they come, not as optimizer state is stored.
    dtypes = dataclasses.replace(step.config.dtypes, optimizer=None)
    remat = step.config.remat if step.decision is None else "none"
    spec = StepSpec.of(keeping, dataclasses.replace(step.config, precision=dtypes, remat=remat), step.spec.mesh_here)
    kept = TrainStep(spec if step.decision is None else spec.with_decision(step.decision))
    shapes = jax.tree.leaves(kept.abstract_state())
    # Parameters and gradients, that is; known before anything is compiled.
    _check_room(sum(leaf.size * leaf.dtype.itemsize for leaf in shapes), limit_bytes)
    compiled = checked_room(kept.compile(), limit_bytes)
    state, batch = start_state(kept, given, rng), kept.spec.put(batch)
    window = int(state.window)
    state, metrics = compiled(state, batch)
    # A skipped window keeps no gradients: the same one again, as long as the scale backs off.
    while state.loss_scale is not None and not bool(state.last_finite):
        if float(state.loss_scale.scale) == float(metrics["loss_scale"]):
            break
        state, metrics = compiled(dataclasses.replace(state, window=jnp.int32(window)), batch)
    return Outcome(
        loss=float(metrics["loss"]), gradients=to_host(state.opt_state["gradients"]), state=to_host(state.state)
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


def keep_gradients() -> optax.GradientTransformation:
    """Leaves parameters as they are; its state is the last gradient."""

    def init(params):
        return {"gradients": jax.tree.map(jnp.zeros_like, params)}

    def update(updates, state, params=None):
        del state, params
        return jax.tree.map(jnp.zeros_like, updates), {"gradients": updates}

    return optax.GradientTransformation(init, update)


def start_state(step: TrainStep, given: TrainState | None, rng: Any) -> TrainState:
    """A state of `step`: its own parameters, or copies of those given, since the step donates them."""
    state = step.init(rng)
    if given is None:
        return state
    check_alive(given)
    check_state(step.abstract_state(), dataclasses.replace(given, opt_state=state.opt_state))
    params = jax.tree.map(lambda leaf, like: jnp.array(leaf, like.dtype), given.params, state.params)
    rest, key = jax.tree.map(jnp.copy, (given.state, given.rng))
    return dataclasses.replace(state, params=params, state=rest, rng=key, window=jnp.copy(given.window))


def checked_room(compiled: jax.stages.Compiled, limit_bytes: int | None) -> jax.stages.Compiled:
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


def to_host(tree: Any) -> Any:
    def move(leaf):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        return np.asarray(leaf)

    return jax.tree.map(move, tree)
