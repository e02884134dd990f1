"""Where the state and the batches of a step lie on a mesh, and which of its axes the rows are sharded over."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jaxmem.errors import BatchError, ConfigError, MeshError
from jaxmem.targets import describe_mesh, in_mesh, mesh_of
from jaxmem.train import _hosts
from jaxmem.train._hosts import is_none
from jaxmem.train._state import TrainState
from jaxmem.workload import Workload, path_string


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
    """How a step lies on a mesh.

    Args:
      workload: whose arrays may be sharded already: then they stay so.
      mesh: where state and batches are put: the mesh asked for, else that of the workload's own arrays; None leaves
        arguments where they are.
      around: the mesh set while the step is traced; unlike `mesh`, it may be of another machine.
      asked: whether the step was made for the mesh, so that rows are sharded over it in any case.
    """

    workload: Workload
    mesh: Any = None
    around: Any = None
    asked: bool = False

    @classmethod
    def of(cls, workload: Workload, mesh: Any) -> "Layout":
        """That of a step made for a mesh, or for none.

        Raises:
          ConfigError: a mesh that is none; MeshError: one that lacks axes of the workload's arrays, or several of them.
        """
        own = {name: getattr(workload, name) for name in ("params", "batch", "state")}
        around = mesh_of(**own) if mesh is None else mesh
        if around is None:
            mesh = around = _hosts.all_devices()
        if mesh is None:
            return cls(workload=workload, mesh=around if _is_here(around) else None, around=around)
        if not isinstance(mesh, (Mesh, AbstractMesh)):
            raise ConfigError(
                wanted="mesh to be a jax.sharding.Mesh", got=repr(mesh), do='Make one, jax.make_mesh((8,), ("data",)).'
            )
        for path, leaf in jax.tree_util.tree_leaves_with_path(own):
            sharding = sharding_of(leaf)
            if sharding is not None and not set(axes_of(sharding.spec)) <= set(mesh.axis_names):
                raise MeshError(
                    wanted=f"arrays sharded over axes of the step's mesh, {describe_mesh(mesh)}",
                    got=f"{path_string(path)} sharded over {sharding.spec} of {describe_mesh(sharding.mesh)}",
                    do="Leave mesh= out to train on the mesh of the arrays, or make them on that of the step.",
                )
        return cls(workload=workload, mesh=mesh, around=mesh, asked=True)

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
        if not self.asked:
            return None
        names = self.mesh.axis_names
        return NamedSharding(self.mesh, PartitionSpec(*[None] * first, "data" if "data" in names else names[0]))

    def batch(self, batch: Any, *, uneven: bool = False) -> Any:
        """A sharding on the mesh for each leaf of a batch: that of the workload's own leaf, else by its rows.

        Args:
          batch: of which leaves are put.
          uneven: whether rows that their shards do not divide may be put whole on every device.

        Raises:
          BatchError: otherwise.
        """
        rows = self.rows
        entry = next((part for part in (rows.spec if rows else ()) if part is not None), None)
        own = [sharding_of(leaf) for leaf in jax.tree.leaves(self.workload.batch, is_leaf=is_none)]
        leaves = list(self.leaves(batch))
        own = own if len(own) == len(leaves) else [None] * len(leaves)

        def place(leaf, axis, own):
            if leaf is None:
                return None
            if own is not None:
                spec = own.spec
            elif axis is None:
                spec = PartitionSpec()
            else:
                spec = PartitionSpec(*[None] * (axis % max(np.ndim(leaf), 1)), entry)
            placed = NamedSharding(self.mesh, spec)
            if _divides(placed, np.shape(leaf)):
                return placed
            if uneven:
                return NamedSharding(self.mesh, PartitionSpec())
            raise BatchError(
                wanted=f"a batch that is divided evenly as {spec} of {describe_mesh(self.mesh)} says",
                got=f"a leaf of shape {np.shape(leaf)}",
                do="Leave the last rows out, or fill them up with rows of weight 0.",
            )

        specs = [place(leaf, axis, sharding) for (leaf, axis), sharding in zip(leaves, own, strict=True)]
        return jax.tree.structure(batch, is_leaf=is_none).unflatten(specs)

    def put(self, batch: Any, example: Callable[[], Any], *, uneven: bool = False) -> Any:
        """A batch on the mesh; with several processes their own rows, if that is what they give.

        Args:
          batch: of one process all of it.
          example: gives shapes of a whole batch.
          uneven: as of `batch`.
        """
        if jax.process_count() == 1:
            return jax.device_put(batch, self.batch(batch, uneven=uneven))
        own_rows = self.workload.per_process_data
        whole = _hosts.whole_shapes(batch, example(), self.leaves(batch)) if own_rows else batch
        return _hosts.put(batch, self.batch(whole, uneven=uneven), whole)

    def leaves(self, batch: Any) -> Iterator[tuple[Any, int | None]]:
        """(leaf, example axis) of a batch, None leaves included."""
        leaves = jax.tree.leaves(batch, is_leaf=is_none)
        axes = jax.tree.leaves(jax.tree.broadcast(self.workload.batch_axes, batch, is_leaf=is_none), is_leaf=is_none)
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
        # Of the mesh that is set, which is a target's where the step is compiled for one.
        if AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:  # its types say so
            return state
        return jax.tree.map(lambda leaf, at: jax.lax.with_sharding_constraint(leaf, at.spec), state, shardings)

    def readable(self, metrics: Any) -> Any:
        """Metrics whole in each of several processes, since one cannot read what lies elsewhere."""
        if jax.process_count() == 1 or AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types:
            return metrics
        return jax.lax.with_sharding_constraint(metrics, PartitionSpec())

    # -- the mesh ----------------------------------------------------------------------------------

    def entered(self, *arguments: Any) -> contextlib.AbstractContextManager[None]:
        """Within it the mesh is set, unless a target's is: that of the step, else that of the arguments' arrays."""
        return in_mesh(mesh_of(arguments=arguments) if self.around is None else self.around, *arguments)

    @property
    def is_here(self) -> bool:
        """Whether the step lies on devices of this machine's own backend."""
        return _is_here(self.mesh)

    @property
    def _explicit(self) -> bool:
        return self.mesh is not None and AxisType.Explicit in self.mesh.axis_types


def sharding_of(leaf: Any) -> NamedSharding | None:
    """How a leaf is sharded over a mesh; None of an array on one device, which says nothing."""
    sharding = getattr(leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


def unsharded(leaf: Any) -> Any:
    """A leaf without its sharding, which would be part of what is traced where the mesh's axes are explicit."""
    if not isinstance(getattr(leaf, "sharding", None), NamedSharding):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=getattr(leaf, "weak_type", False))


def axes_of(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that a spec names."""
    entries = [entry for entry in spec if entry is not None]
    return tuple(name for entry in entries for name in ((entry,) if isinstance(entry, str) else entry))


def _divides(sharding: NamedSharding, shape: tuple[int, ...]) -> bool:
    try:
        sharding.shard_shape(shape)
    except ValueError:
        return False
    return True


def _is_here(mesh: Any) -> bool:
    """Whether it is over devices of this machine's own backend."""
    return isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == jax.default_backend()
