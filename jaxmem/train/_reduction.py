"""Reduction of gradients as a lever: those of a sharded batch are reduced once a step, or with each micro-batch."""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxmem import accumulate
from jaxmem.config import MemoryConfig
from jaxmem.errors import ConfigError
from jaxmem.targets import Target
from jaxmem.train._layout import axes_of, sharding_of, unsharded
from jaxmem.train._lever import Lever, Told, Update
from jaxmem.train._loss import partition
from jaxmem.train._spec import StepSpec, once
from jaxmem.workload import path_string

_WHEN = {"once": "once, after the last micro-batch", "each": "with each micro-batch"}
_NARROW_SUMS = (
    "Gradients of {} micro-batches are summed in {}: what is small beside the sum so far is lost. "
    'accumulator_dtype="float32" loses nothing.'
)
_DEFAULT_ACCUMULATOR = MemoryConfig().accumulator_dtype


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


@once
def reduction(spec: StepSpec) -> Reduction:
    """Whether every shard of the batch accumulates its own gradients.

    Raises:
      ConfigError: that was asked for, and a parameter is sharded over the axes of the rows.
    """
    each = Reduction(kind="each", rows=spec.layout.rows)
    wanted = spec.config.gradient_reduction
    if each.shards == 1 or wanted == "each":
        return each
    with spec.entered():
        for path, leaf in jax.tree_util.tree_leaves_with_path(spec.abstract_params()):
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
        if spec.config.accumulation_steps == 1:
            return dataclasses.replace(each, why="there is only one")
        found = _separability(spec, each.shards)
        if found.verdict != "yes":
            why = f"it was not found that the loss is a sum or mean over rows: {found.why}"
            return dataclasses.replace(each, why=why)
        failed = _fails(spec, each.rows)
    if failed:
        return dataclasses.replace(each, why=f"shards cannot accumulate by themselves: {failed}")
    return dataclasses.replace(each, kind="once", why="the loss was found to be a sum or mean over rows")


def _separability(spec: StepSpec, shards: int) -> accumulate.Separability:
    """Whether the loss of a micro-batch is the same however its rows are dealt out to shards."""
    trainable, frozen, batch, rng, state = spec.loss_arguments()
    # As a shard sees them: rows that are typed by the axes they lie on cannot be parted.
    batch = jax.tree.map(unsharded, batch)
    size = next(leaf.shape[axis] for leaf, axis in spec.layout.leaves(batch) if axis is not None)
    if size % shards:
        return accumulate.Separability(verdict="unknown", why=f"{shards} shards do not divide {size} rows")

    def loss(trainable, batch, **keywords):
        batch, frozen = batch
        return spec.loss(frozen)(trainable, batch, **keywords)

    # What is not trained has no gradient, and no rows.
    given, axes = (batch, frozen), (spec.workload.batch_axes, None)
    return accumulate.separable_by_rows(loss, trainable, given, rng=rng, state=state, batch_axes=axes, parts=shards)


def _fails(spec: StepSpec, rows: Any) -> str:
    """Why gradients cannot be accumulated locally, found out by a dry trace; empty if they can."""
    params, state, rng = spec.abstract_model()
    trainable, frozen = partition(params, spec.workload.trainable)

    def value(trainable, frozen, batch, rng, state):
        steps, axes = spec.config.accumulation_steps, spec.workload.batch_axes
        fn = accumulate.value_and_grad(spec.loss(frozen), steps, batch_axes=axes, data_sharding=rows, separable=True)
        return fn(trainable, batch, rng=rng, state=state).value

    try:
        jax.eval_shape(value, trainable, frozen, spec.abstract_batch(), rng, state)
    except Exception as error:  # whatever a loss does that only works on the whole batch
        return " ".join(str(error).split())[:200].rstrip(".")
    return ""


def _idle(spec: StepSpec) -> Iterator[str]:
    config = spec.config
    shards = Reduction(kind="each", rows=spec.layout.rows).shards
    if config.gradient_reduction == "once" and shards == 1:
        yield "gradient_reduction='once' does nothing, as the rows are not sharded: pass mesh=, or a sharded batch."
    size = next((leaf.shape[axis] for leaf, axis in spec.layout.leaves(spec.workload.batch) if axis is not None), 0)
    rows = size // config.accumulation_steps
    if config.gradient_reduction != "once" and rows % shards and size % shards == 0:  # another batch is refused
        # XLA shares a micro-batch among as many shards as divide it and the rows' own sharding; the rest repeat them.
        yield (
            f"accumulation_steps={config.accumulation_steps} leaves {rows} of {size} rows to a micro-batch, which "
            f"{shards} shards cannot share: each row is computed on {shards // math.gcd(rows, shards)} of them. Take "
            "fewer steps, or more rows."
        )
    # Shards that accumulate locally add up their gradients in it too.
    local = config.gradient_reduction != "each" and shards > 1
    if config.accumulator_dtype != _DEFAULT_ACCUMULATOR and config.accumulation_steps == 1 and not local:
        yield (
            f"accumulator_dtype={config.accumulator_dtype!r} does nothing, as one micro-batch has no accumulator: set "
            "accumulation_steps."
        )


def _around(spec: StepSpec, update: Update) -> Update:
    def reduced(state, batch, **options):
        found = reduction(spec)
        if found.kind == "once":
            options["data_sharding"] = found.rows
            # What "auto" found of the example batch holds for another that is like it.
            options["separable"] = bool(found.why) and _types(batch) == _types(spec.abstract_batch())
        return update(state, batch, **options)

    return reduced


def _types(batch: Any) -> list[Any]:
    return [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(batch)]


def _told(spec: StepSpec, target: Target) -> Told:
    found, dtypes, notes, news = reduction(spec), spec.config.dtypes, [], []
    if found.why:
        often = found.kind == "each" and spec.config.accumulation_steps > 1
        (notes if often else news).append(f"Gradients are reduced {_WHEN[found.kind]}: {found.why}.")
    if spec.config.accumulation_steps > 1 and jnp.finfo(dtypes.accumulator).bits < 32:
        notes.append(_NARROW_SUMS.format(spec.config.accumulation_steps, dtypes.accumulator))
    fields = {"shards": found.shards, "gradient_reduction": found.kind if found.shards > 1 else None}
    return Told(notes=tuple(notes), news=tuple(news), fields=fields)


LEVER = Lever(idle=_idle, around=_around, told=_told)
