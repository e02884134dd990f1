"""The loss of a workload as a config wants it: its trainable parameters, precision and blocks."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jaxmem import accumulate, precision, random_bits, remat
from jaxmem._settled import AS_WRITTEN, Settled
from jaxmem._signatures import declares
from jaxmem._trainable import nothing_trained, select_paths
from jaxmem.config import Memory, MemoryConfig
from jaxmem.errors import ConfigError, PrecisionWithoutEffect
from jaxmem.remat.auto import ResidualPlan
from jaxmem.remat.blocks import at_blocks, marked, tied
from jaxmem.remat.roll import rolled
from jaxmem.workload import Workload, path_string


def configured_loss(
    workload: Workload,
    config: MemoryConfig,
    frozen=None,
    *,
    checkpoint=remat.checkpoint_unchecked,
    decision: ResidualPlan | None = None,
    form: Settled = AS_WRITTEN,
):
    """The loss as a step differentiates it, `(trainable, batch, *, rng, state)`, with the config applied.

    Args:
      frozen: the parameters that are not trained.
      checkpoint: what marks a block.
      decision: what a budget was spent on; blocks are found, whether the loss marks them or not.
      form: order, roll, random masks and gathers. Masks are fenced first, then gathers are made narrow, then layers
        are rolled, and in what comes of that blocks are found, for remat and for ties.
    """
    loss_fn, compute = workload.loss_fn, jnp.dtype(config.dtypes.compute)
    if declares(loss_fn, "memory"):
        if form.order != "free" and config.policy.keeps_everything and decision is None:
            checkpoint = marked  # ties lie at blocks whether they are recomputed or not
        memory = Memory(remat=config.policy, compute_dtype=compute, checkpoint=checkpoint)
        loss_fn = functools.partial(loss_fn, memory=memory)
    else:
        if compute != jnp.float32:
            loss_fn = precision.compute_in(loss_fn, compute, keep=accumulate.counted_leaves)

    def loss(trainable, batch, **keywords):
        keywords = {k: v for k, v in keywords.items() if declares(loss_fn, k)}
        return loss_fn(merge(trainable, frozen), batch, **keywords)

    loss = random_bits.drawing_by(loss, config.generator)
    if form.random == "fenced":
        loss = random_bits.fenced(loss)
    if form.gathers == "narrow":
        loss = precision.narrow_gathers(loss)
    if form.roll:
        loss = rolled(loss)
    if decision is not None:
        return decision.apply(loss, form.order)
    if not declares(workload.loss_fn, "memory") and not config.policy.keeps_everything:
        # It marks no blocks, so they are found.
        mark = lambda fn, *, scanned, name: checkpoint(fn, config.remat, scanned=scanned)  # noqa: E731
        return at_blocks(loss, mark, order=form.order)
    return tied(loss, form.order)


def partition(params, selection):
    """Trainable and frozen parameters, each with None where the other has a leaf."""
    chosen = select_paths(params, selection)
    if not any(jax.tree.leaves(chosen)):
        raise nothing_trained(params)
    trainable = jax.tree.map(lambda leaf, yes: leaf if yes else None, params, chosen)
    frozen = jax.tree.map(lambda leaf, yes: None if yes else leaf, params, chosen)
    return trainable, frozen


def merge(trainable, frozen):
    """The parameters that `partition` took apart."""
    if frozen is None:
        return trainable
    return jax.tree.map(lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda x: x is None)


def state_reductions(workload: Workload, state):
    """How micro-batches combine each leaf of the state, or a prefix of it, where that was given."""
    wanted = workload.state_reduction
    if not callable(wanted):
        return wanted
    return jax.tree_util.tree_map_with_path(lambda path, leaf: wanted(path_string(path), leaf), state)


def check_precision(workload: Workload, config: MemoryConfig, state, batch) -> None:
    """A loss that declares `memory` casts by itself: PrecisionWithoutEffect if nothing in it has the dtype."""
    dtype = jnp.dtype(config.dtypes.compute)
    if not declares(workload.loss_fn, "memory") or dtype == jnp.float32:
        return
    loss = configured_loss(workload, config)
    jaxpr = jax.make_jaxpr(lambda params, batch, rng, state: loss(params, batch, rng=rng, state=state))(
        state.params, batch, state.rng, state.state
    )
    if not precision.uses_dtype(jaxpr.jaxpr, dtype):
        raise PrecisionWithoutEffect(
            wanted=f"a loss that computes in memory.compute_dtype ({dtype})",
            got="a loss that declares `memory` but has no value of that dtype",
            do="Pass dtype=memory.compute_dtype to the model's layers, or cast the parameters in the loss.",
        )


def check_widths(config: MemoryConfig) -> None:
    """JAX makes float32 of float64 where 64-bit types are off; a config that asks for it is refused."""
    dtypes = {name: value for name, value in dataclasses.asdict(config.dtypes).items() if value == "float64"}
    if dtypes and jax.dtypes.canonicalize_dtype("float64") != jnp.float64:
        raise ConfigError(
            wanted="dtypes of at most 32 bits, as JAX's 64-bit types are off",
            got=", ".join(f"{name}='float64'" for name in dtypes),
            do='Call jax.config.update("jax_enable_x64", True) first, or use float32.',
        )
