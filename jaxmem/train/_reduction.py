"""When the gradients of a sharded batch are reduced: once a step, or with each micro-batch."""

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Literal

import jax
from jax.sharding import NamedSharding

from jaxmem.errors import ConfigError
from jaxmem.train._layout import sharding_of
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
        entries = [entry for entry in (self.rows.spec if self.rows else ()) if entry is not None]
        return tuple(name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry))

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
    return each


def local_shape(leaf: Any) -> tuple[int, ...]:
    """The shape of a leaf on one device."""
    own = sharding_of(leaf)
    return tuple(leaf.shape if own is None else own.shard_shape(leaf.shape))
