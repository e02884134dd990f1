"""The mesh that arrays lie on, and entering it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from jaxmem.errors import MeshError
from jaxmem.workload import path_string


def mesh_of(*, mixed: bool = False, **trees: Any) -> Mesh | AbstractMesh | None:
    """The mesh that arrays and shapes are sharded over; None if none is sharded.

    A mesh of one device counts only if there is no larger one.

    Args:
      mixed: whether to return None, instead of raising, for several meshes that JAX can mix: automatic axes over the
        same devices.
      **trees: pytrees, by their names in an error.

    Raises:
      MeshError: one program cannot use all of the meshes.
    """
    found = {mesh: leaf for leaf in jax.tree.leaves(trees) if (mesh := _mesh(leaf)) is not None}
    meshes = [mesh for mesh in found if mesh.size > 1] or list(found)
    meshes.sort(key=lambda mesh: not isinstance(mesh, Mesh))  # stable: concrete ones, which know their devices, first
    if not meshes:
        return None
    first = meshes[0]
    other = next((mesh for mesh in meshes if not _agree(first, mesh)), None)
    if other is None:
        return first
    if mixed and _may_mix(meshes):
        return None
    paths = {id(leaf): path_string(path) for path, leaf in jax.tree_util.tree_leaves_with_path(trees)}
    raise MeshError(
        wanted="arrays on one mesh",
        got=" and ".join(f"{paths[id(found[mesh])]} on {describe_mesh(mesh)}" for mesh in (first, other)),
        do="Put them on one with jax.device_put(x, NamedSharding(mesh, spec)).",
    )


@contextlib.contextmanager
def in_mesh(mesh: Mesh | AbstractMesh | None, *arguments: Any) -> Iterator[None]:
    """Sets a mesh, unless one is set already: for bare PartitionSpecs, and for values typed by its axes.

    Args:
      mesh: None sets nothing.
      *arguments: arguments of the functions called within; if some are traced, the mesh becomes part of that trace.

    Raises:
      MeshError: another mesh is set, or the code within brings its own.
    """
    current = jax.sharding.get_abstract_mesh()
    if mesh is None or current.axis_names:
        if mesh is not None and not _fits(mesh, current):
            raise MeshError(
                wanted=f"the mesh of the arrays, {describe_mesh(mesh)}, to be set, or none",
                got=f"{describe_mesh(current)} set by jax.set_mesh",
                do="Leave jax.set_mesh out: the mesh of the arrays is set automatically.",
            )
        yield
        return
    traced = any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(arguments))
    enter = (
        jax.set_mesh(mesh)
        if isinstance(mesh, Mesh) and not traced
        else jax.sharding.use_abstract_mesh(mesh.abstract_mesh)
    )
    try:
        with enter:
            yield
    except ValueError as error:
        message = " ".join(str(error).split())
        if "should match the mesh passed to" not in message:
            raise
        raise MeshError(
            wanted=f"code for the mesh of its arrays, {describe_mesh(mesh)}",
            got=f"code with a mesh of its own ({message[:300]})",
            do="Leave mesh= out of jax.shard_map, which then means the mesh of the arrays; or put the arrays on that "
            "of the code.",
        ) from error


def one_device(mesh: Mesh | AbstractMesh) -> Mesh:
    """A mesh with the same axes, each of size 1, over one device of this machine."""
    device = np.array(jax.local_devices()[:1]).reshape((1,) * len(mesh.axis_names))
    return Mesh(device, mesh.axis_names, axis_types=mesh.axis_types)


def describe_mesh(mesh: Mesh | AbstractMesh) -> str:
    """`a mesh (data=4, model=2; explicit axes)`, and the platform if it has devices."""
    axes = ", ".join(f"{name}={size}" for name, size in mesh.shape.items())
    types = "; explicit axes" if AxisType.Explicit in mesh.axis_types else ""
    where = f" of {mesh.devices.flat[0].platform} devices" if isinstance(mesh, Mesh) else ""
    return f"a mesh ({axes}{types}){where}"


def _mesh(leaf: Any) -> Mesh | AbstractMesh | None:
    sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
    return sharding.mesh if isinstance(sharding, NamedSharding) and sharding.mesh.axis_names else None


def _agree(a: Mesh | AbstractMesh, b: Mesh | AbstractMesh) -> bool:
    """Whether one program can use values on both: they are the same mesh, or one is the abstract mesh of the other."""
    if isinstance(a, Mesh) and isinstance(b, Mesh):
        return a == b
    return dict(a.shape) == dict(b.shape) and a.axis_types == b.axis_types


def _may_mix(meshes: list[Mesh | AbstractMesh]) -> bool:
    automatic = all(set(mesh.axis_types) == {AxisType.Auto} for mesh in meshes)
    return (
        automatic and len({tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else mesh.size for mesh in meshes}) == 1
    )


def _fits(mesh: Mesh | AbstractMesh, current: AbstractMesh) -> bool:
    """Whether values on `mesh` may be used where `current` is set; a target's mesh may have other axes."""
    device = current.abstract_device
    if not isinstance(mesh, Mesh) or device is None or mesh.size == 1:
        return True
    own = mesh.devices.flat[0]
    if (device.platform, device.device_kind) != (own.platform, own.device_kind):
        return True
    explicit = AxisType.Explicit
    return dict(mesh.shape) == dict(current.shape) and (explicit in mesh.axis_types) == (explicit in current.axis_types)
