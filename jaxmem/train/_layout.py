"""Where the state and the batches of a step lie on a mesh, and which of its axes the rows are sharded over."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem.errors import ConfigError
from jaxmem.train._state import TrainState
from jaxmem.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a step lies on a mesh.

    Args:
      workload: whose arrays may be sharded already: then they stay so.
      mesh: that the step was made for; None where it takes its arguments as they come.
    """

    workload: Workload
    mesh: Any = None

    @classmethod
    def of(cls, workload: Workload, mesh: Any) -> "Layout":
        if mesh is not None and not isinstance(mesh, (Mesh, AbstractMesh)):
            raise ConfigError(
                wanted="mesh to be a jax.sharding.Mesh", got=repr(mesh), do='Make one, jax.make_mesh((8,), ("data",)).'
            )
        return cls(workload=workload, mesh=mesh)

    # -- rows --------------------------------------------------------------------------------------

    @property
    def rows(self) -> NamedSharding | None:
        """How rows are sharded: those of the workload's example batch, else over the mesh's axis "data", or its first.

        The sharding of a batch of which all leaves have `batch_axes`, if that is a number, as example axis. None where
        the rows are not sharded.
        """
        first = self.workload.batch_axes if isinstance(self.workload.batch_axes, int) else 0
        for leaf, axis in self.leaves(self.workload.batch):
            own = sharding_of(leaf)
            if own is None or axis is None:
                continue
            entry = own.spec[axis % leaf.ndim] if axis % leaf.ndim < len(own.spec) else None
            if entry is not None:
                mesh = own.mesh if self.mesh is None else self.mesh
                return NamedSharding(mesh, PartitionSpec(*[None] * (first % leaf.ndim), entry))
        if self.mesh is None:
            return None
        names = self.mesh.axis_names
        return NamedSharding(self.mesh, PartitionSpec(*[None] * first, "data" if "data" in names else names[0]))

    @property
    def rows_are_here(self) -> bool:
        """Whether rows are sharded over devices of this machine's own backend."""
        rows = self.rows
        mesh = rows.mesh if rows is not None else None
        return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == jax.default_backend()

    def batch(self, batch: Any) -> Any:
        """A sharding on the mesh for each leaf of a batch: that of the workload's own leaf, else by its rows."""
        rows = self.rows
        entry = next(part for part in (rows.spec if rows else ()) if part is not None)
        own = [sharding_of(leaf) for leaf in jax.tree.leaves(self.workload.batch, is_leaf=_is_none)]
        leaves = list(self.leaves(batch))
        own = own if len(own) == len(leaves) else [None] * len(leaves)

        def spec(leaf, axis, own):
            if own is not None:
                return own.spec
            return PartitionSpec() if axis is None else PartitionSpec(*[None] * (axis % max(np.ndim(leaf), 1)), entry)

        specs = [
            None if leaf is None else NamedSharding(self.mesh, spec(leaf, axis, own))
            for (leaf, axis), own in zip(leaves, own, strict=True)
        ]
        return jax.tree.structure(batch, is_leaf=_is_none).unflatten(specs)

    def leaves(self, batch: Any) -> Iterator[tuple[Any, int | None]]:
        """(leaf, example axis) of a batch, None leaves included."""
        leaves = jax.tree.leaves(batch, is_leaf=_is_none)
        axes = jax.tree.leaves(jax.tree.broadcast(self.workload.batch_axes, batch, is_leaf=_is_none), is_leaf=_is_none)
        return zip(leaves, axes, strict=True)

    # -- state -------------------------------------------------------------------------------------

    def state(self, shapes: TrainState) -> TrainState:
        """A sharding on the mesh for each leaf of a state: parameters as they are, moments like theirs, the rest whole.

        Args:
          shapes: of the state, those of parameters and model state with the shardings of the workload's own arrays.
        """

        def own(leaf):
            sharding = sharding_of(leaf)
            return PartitionSpec() if sharding is None else sharding.spec

        params = dict(jax.tree_util.tree_leaves_with_path(shapes.params))

        def like_parameter(path, leaf):
            for start in range(len(path) + 1):  # mu['w'] is that of the parameter ['w']
                param = params.get(path[start:])
                if param is not None and param.shape == leaf.shape:
                    return own(param)
            return PartitionSpec()

        specs = jax.tree.map(own, shapes)
        moments = jax.tree_util.tree_map_with_path(like_parameter, shapes.opt_state)
        specs = dataclasses.replace(specs, opt_state=moments)

        def place(leaf, spec):
            # Types of explicit axes have an entry for each dimension, and to JAX's caches P() is another sharding.
            rank = leaf.ndim if self._explicit else len(spec)
            return NamedSharding(self.mesh, PartitionSpec(*spec, *[None] * (rank - len(spec))))

        return jax.tree.map(place, shapes, specs)

    def constrain(self, state: TrainState, shardings: TrainState) -> TrainState:
        """A new state sharded as the old one, so that the next step is the same program."""
        if self._explicit:  # its types say so
            return state
        # Of the mesh that is set, which is a target's where the step is compiled for one.
        return jax.tree.map(lambda leaf, at: jax.lax.with_sharding_constraint(leaf, at.spec), state, shardings)

    # -- the mesh ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def entered(self, *arguments: Any) -> Iterator[None]:
        """Within it the mesh is set, unless another one is, so that a loss may use bare PartitionSpecs."""
        if self.mesh is None or jax.sharding.get_abstract_mesh().axis_names:
            yield
            return
        traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments))
        abstract = self.mesh.abstract_mesh if isinstance(self.mesh, Mesh) else self.mesh
        with (
            jax.set_mesh(self.mesh)
            if isinstance(self.mesh, Mesh) and not traced
            else jax.sharding.use_abstract_mesh(abstract)
        ):
            yield

    @property
    def _explicit(self) -> bool:
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types


def sharding_of(leaf: Any) -> NamedSharding | None:
    """How a leaf is sharded over a mesh; None of an array on one device, which says nothing."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


def _is_none(x: Any) -> bool:
    return x is None
