"""When the gradients of a sharded batch are reduced: once a step, or with each micro-batch."""

import dataclasses
import functools
import math
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax.sharding import NamedSharding

from jaxmem import accumulate
from jaxmem.errors import ConfigError
from jaxmem.train._layout import Layout, axes_of, sharding_of, unsharded
from jaxmem.train._loss import partition
from jaxmem.workload import path_string

if TYPE_CHECKING:
    from jaxmem.train._step import TrainStep


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reduction:
    """What was chosen.

    Args:
      kind: "once", every shard accumulating its own gradients, or with "each" micro-batch.
      rows: how the rows are sharded; None where they are not.
      why: one sentence, where `gradient_reduction="auto"` chose.
    """

    kind: Literal["once", "each"]
    rows: NamedSharding | None = None
    why: str = ""

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that the rows are sharded over."""
        return axes_of(self.rows.spec) if self.rows else ()

    @property
    def shards(self) -> int:
        """Among how many devices gradients are reduced."""
        return math.prod(dict(self.rows.mesh.shape)[name] for name in self.axes) if self.rows else 1


def choose_reduction(step: "TrainStep", params: Any, rows: NamedSharding | None) -> Reduction:
    """Whether the step's gradients are accumulated locally.

    Args:
      params: shapes, with the shardings that they have.
      rows: how the rows are sharded.

    Raises:
      ConfigError: "once" was asked for, and a parameter is sharded over the axes of the rows.
    """
    each = Reduction(kind="each", rows=rows)
    wanted = step.config.gradient_reduction
    if each.shards == 1 or wanted == "each":
        return each
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        own = sharding_of(leaf)
        taken = set(Reduction(kind="each", rows=own).axes) & set(each.axes)
        if taken and wanted == "once":
            raise ConfigError(
                wanted="parameters that every shard of the batch holds whole, for gradient_reduction='once'",
                got=f"{path_string(path, root='params')} sharded over {', '.join(map(repr, sorted(taken)))}",
                do="Use gradient_reduction='each'.",
            )
        if taken:
            return dataclasses.replace(each, why="parameters are sharded over the axes of the rows")
    if wanted == "once":
        return dataclasses.replace(each, kind="once")
    steps = step.config.accumulation_steps
    if steps == 1:
        return dataclasses.replace(each, why="there is only one")
    found = _separability(step, each.shards)
    if found.verdict == "yes":
        failed = _fails(step, rows)
        if failed:
            return dataclasses.replace(each, why=f"shards cannot accumulate by themselves: {failed}")
        return dataclasses.replace(each, kind="once", why="the loss was found to be a sum or mean over rows")
    return dataclasses.replace(each, why=f"it was not found that the loss is a sum or mean over rows: {found.why}")


def _separability(step: "TrainStep", shards: int) -> accumulate.Separability:
    """Whether the loss of a micro-batch is the same however its rows are dealt out to shards."""
    take = functools.partial(
        accumulate.micro_batch,
        index=0,
        num_micro_batches=step.config.accumulation_steps,
        batch_axes=step.workload.batch_axes,
    )
    # As a shard sees them: rows that are typed by the axes they lie on cannot be parted.
    batch = jax.eval_shape(take, jax.tree.map(unsharded, step.abstract_batch()))
    size = next(leaf.shape[axis] for leaf, axis in Layout(workload=step.workload).leaves(batch) if axis is not None)
    if size % shards:
        return accumulate.Separability(verdict="unknown", why=f"{shards} shards do not divide {size} rows")
    state = step.abstract_state()
    trainable, frozen = partition(state.params, step.workload.trainable)

    def loss(trainable, batch, **keywords):
        batch, frozen = batch
        return step.loss(frozen)(trainable, batch, **keywords)

    # What is not trained has no gradient, and no rows.
    given, axes = (batch, frozen), (step.workload.batch_axes, None)
    return accumulate.separable_by_rows(
        loss, trainable, given, rng=state.rng, state=state.state, batch_axes=axes, parts=shards
    )


def _fails(step: "TrainStep", rows: Any) -> str:
    """Why gradients cannot be accumulated locally, found out by a dry trace; empty if they can."""
    state = step.abstract_state()
    trainable, frozen = partition(state.params, step.workload.trainable)

    def value(trainable, frozen, batch, rng, state):
        steps, axes = step.config.accumulation_steps, step.workload.batch_axes
        fn = accumulate.value_and_grad(step.loss(frozen), steps, batch_axes=axes, data_sharding=rows, separable=True)
        return fn(trainable, batch, rng=rng, state=state).value

    try:
        jax.eval_shape(value, trainable, frozen, step.abstract_batch(), state.rng, state.state)
    except Exception as error:  # whatever a loss does that only works on the whole batch
        return " ".join(str(error).split())[:200].rstrip(".")
    return ""


def local_shape(leaf: Any) -> tuple[int, ...]:
    """The shape of a leaf on one device."""
    own = sharding_of(leaf)
    return tuple(leaf.shape if own is None else own.shard_shape(leaf.shape))
