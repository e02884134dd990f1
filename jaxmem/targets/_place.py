"""Placing the arguments of a program on a target's devices, as shapes."""

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxmem._shown import Brief
from jaxmem.errors import RetargetError
from jaxmem.targets._mesh import describe_mesh
from jaxmem.targets._target import Target
from jaxmem.workload import path_string


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placed(Brief, identity=("target", "notes")):
    """Arguments that were placed on a target.

    Args:
      args: the arguments, with shapes on the target's devices in place of arrays and shapes.
      target: the target, with the mesh of the arguments' shardings.
      notes: sentences for the report's warnings.
    """

    args: tuple[Any, ...]
    target: Target
    notes: tuple[str, ...] = ()


def place(args: tuple[Any, ...], target: Target, *, in_shardings: Any = None) -> Placed:
    """Places arguments on a deviceless target; for other targets they stay unchanged.

    An argument keeps its sharding if that is a bare PartitionSpec, or a NamedSharding over an AbstractMesh or over a
    mesh of this machine with as many devices as the target. All other arguments are replicated.

    Args:
      args: pytrees of arrays, `jax.ShapeDtypeStruct` and static values.
      target: the target to place them on.
      in_shardings: a prefix of `args` of PartitionSpecs, NamedShardings and None; it overrides the arguments' own.

    Raises:
      RetargetError: the target's devices cannot form a mesh, or its mesh lacks an axis.
    """
    if not target.deviceless:
        _check_devices(args, target)
        return Placed(args=args, target=target)
    given = _broadcast(in_shardings, args)
    leaves, tree = jax.tree.flatten(args)
    wanted = [
        own if own is not None else getattr(leaf, "sharding", None) for own, leaf in zip(given, leaves, strict=True)
    ]
    target = _with_mesh_of([sharding for sharding in wanted if isinstance(sharding, NamedSharding)], target)
    mesh = target.mesh
    moved = [_move(leaf, sharding, mesh, target) for leaf, sharding in zip(leaves, wanted, strict=True)]
    notes: tuple[str, ...] = ()
    if target.device_count > 1 and moved and not any(_is_sharded(leaf) for leaf in moved):
        notes = (unsharded(target),)
    if any(_pinned(sharding) and not _pinned(leaf.sharding) for leaf, sharding in zip(moved, wanted, strict=True)):
        notes += (
            f"Arguments pinned to the host are counted on the device: {target.name}'s compiler, without the device, "
            "has no host memory for arguments.",
        )
    return Placed(args=jax.tree.unflatten(tree, moved), target=target, notes=notes)


def unsharded(target: Target) -> str:
    """What it means that no argument names a sharding, and the line that shards the batch."""
    axis = next(iter(dict(target.mesh_axes)), "data")
    return (
        f"Arguments are replicated, since none of them names a sharding: each of the {target.device_count} devices of "
        f"{target.name} holds all of them and does the whole step. Shard the batch: batch = jax.tree.map(lambda x: "
        "jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.NamedSharding(mesh, jax.P("
        f"{axis!r}))), batch). The command line passes `mesh` to a FUNCTION that declares it, def workload(mesh); in "
        f"Python it is jaxmem.targets.resolve_target({target.name!r}).mesh."
    )


def _check_devices(args: tuple[Any, ...], target: Target) -> None:
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        mesh = getattr(getattr(leaf, "sharding", None), "mesh", None)
        if isinstance(mesh, AbstractMesh) and mesh.size > 1:
            raise RetargetError(
                wanted=f"arguments on devices of {target.name}",
                got=f"{path_string(path, root='argument')} sharded over {describe_mesh(mesh)}, which has none",
                do=f"Name a target of {mesh.size} devices, such as tpu-v5e:2x2; or shard over jax.make_mesh.",
            )


def _pinned(sharding: Any) -> bool:
    return isinstance(sharding, NamedSharding) and sharding.memory_kind == "pinned_host"


def _broadcast(in_shardings: Any, args: tuple[Any, ...]) -> list[Any]:
    """The sharding given for each leaf of `args`, or None."""
    if in_shardings is None:
        return [None] * len(jax.tree.leaves(args))
    if _is_entry(in_shardings):
        return [in_shardings] * len(jax.tree.leaves(args))
    prefix = tuple(in_shardings) if isinstance(in_shardings, list) else in_shardings
    try:
        full = jax.tree.map(lambda entry, part: [entry] * len(jax.tree.leaves(part)), prefix, args, is_leaf=_is_entry)
    except (ValueError, TypeError) as error:
        raise RetargetError(
            wanted="in_shardings to be a tree prefix of the arguments",
            got=f"{in_shardings!r} ({' '.join(str(error).split())[:200]})",
            do="Give one sharding for each argument, in a tuple.",
        ) from None
    return [entry for entries in jax.tree.leaves(full, is_leaf=lambda x: isinstance(x, list)) for entry in entries]


def _is_entry(value: Any) -> bool:
    return value is None or isinstance(value, (PartitionSpec, jax.sharding.Sharding))


def _with_mesh_of(shardings: list[NamedSharding], target: Target) -> Target:
    """The target with the mesh of the shardings, unless it has one already."""
    for sharding in shardings:
        axes = dict(sharding.mesh.shape)
        if not axes or target.mesh_axes or sharding.mesh.size == 1 != target.device_count:
            continue  # a mesh of one device shards nothing
        if sharding.mesh.size != target.device_count:
            raise RetargetError(
                wanted=f"a mesh over the {target.device_count} device(s) of {target.name}",
                got=f"an argument sharded over {describe_mesh(sharding.mesh)}",
                do="Shard over an AbstractMesh with as many devices, or name another topology.",
            )
        return dataclasses.replace(target.with_mesh(**axes), axis_types=sharding.mesh.axis_types)
    return target


def _move(leaf: Any, sharding: Any, mesh: Mesh, target: Target) -> Any:
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)):
        return leaf
    spec, memory = PartitionSpec(), None
    if isinstance(sharding, PartitionSpec):
        spec = sharding
    elif isinstance(sharding, NamedSharding):
        spec = sharding.spec
        memory = "pinned_host" if _pinned(sharding) else None  # the device's own kind has a name on each platform
        if sharding.mesh.size == 1 and isinstance(sharding.mesh, Mesh):
            spec = PartitionSpec()
    missing = sorted({axis for part in spec for axis in _axes(part)} - set(mesh.axis_names))
    if missing:
        raise RetargetError(
            wanted=f"shardings over the mesh axes of {target.name}: {', '.join(map(str, mesh.axis_names))}",
            got=f"an argument sharded over {', '.join(map(str, missing))}",
            do=f"Use resolve_target({target.name!r}).with_mesh({missing[0]}={target.device_count}).",
        )
    placed = NamedSharding(mesh, spec, memory_kind=memory)
    dtype = leaf.dtype
    return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=placed, weak_type=getattr(leaf, "weak_type", False))


def _axes(part: Any) -> tuple[Any, ...]:
    """Names in an entry of a PartitionSpec, which may also be None or UNCONSTRAINED."""
    return part if isinstance(part, tuple) else (part,) if isinstance(part, str) else ()


def _is_sharded(leaf: Any) -> bool:
    sharding = getattr(leaf, "sharding", None)
    return isinstance(sharding, NamedSharding) and any(part is not None for part in sharding.spec)
