"""A step in several processes: the same program in all of them, and rows that are where its devices are."""

import contextlib
import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxmem._blame import where_raised
from jaxmem._installed import version
from jaxmem._peers import LOST, Failure, peers
from jaxmem._processes import check_same
from jaxmem.errors import BatchError, ProcessError
from jaxmem.workload import path_string

_PACKAGES = ("jaxmem", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
_SAME_BATCH = (
    "With per_process_data=False every process gives the whole batch: seed the data the same everywhere, or pass "
    "Workload(..., per_process_data=True) if each gives rows of its own."
)


def all_devices() -> Mesh | None:
    """All devices on one axis "data", where there are several processes; else None."""
    if jax.process_count() == 1:
        return None
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


# -- what must be the same ------------------------------------------------------------------------


def check_same_step(step: Any) -> None:
    """ProcessError unless all processes train the same step: workload, config, decision, versions of packages."""
    if jax.process_count() == 1:
        return
    things = {f"the version of {name}": str(version(name)) for name in _PACKAGES}
    if hasattr(step, "abstract_arguments"):
        check_mesh(step.spec.layout.mesh)
        state, batch = step.abstract_arguments()
        for root, tree in (("state", state), ("batch", batch)):
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                things[path_string(path, root=root)] = f"{leaf.dtype}{list(leaf.shape)}, {leaf.sharding}"
        fields = json.loads(step.config.to_json())
        things |= {f"the config's {name}": json.dumps(value) for name, value in fields.items()}
        things["what the remat budget keeps"] = str(getattr(step.decision, "hash", None))
    check_same(things)


def check_mesh(mesh: Any) -> None:
    """ProcessError unless a mesh has devices of all processes: without, each would train a model of its own."""
    there = set() if mesh is None else {device.process_index for device in mesh.devices.flat}
    if len(there) < jax.process_count():
        shown = ", ".join(map(str, sorted(there)[:8])) or "none"
        raise ProcessError(
            wanted=f"a mesh with devices of all {jax.process_count()} processes",
            got=f"one with devices of process {shown} alone",
            do="Make it of jax.devices(), which are those of all processes, not of jax.local_devices(); without a mesh "
            "jaxmem takes all.",
        )


def check_same_values(tree: Any, root: str, *, do: str = "Make it from the same seed, or file, in all.") -> None:
    """ProcessError unless all processes have equal arrays; those of several processes are passed over."""
    if jax.process_count() == 1:
        return
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    things = {path_string(path, root=root): _digest(leaf) for path, leaf in leaves if not _is_spread(leaf)}
    check_same(things, do=do)


def check_same_batch(step: Any, batch: Any) -> None:
    """ProcessError unless all processes pass the same batch, where they shall; a look at the first is cheap."""
    if not getattr(getattr(step, "workload", None), "per_process_data", False):
        check_same_values(batch, "the first batch", do=_SAME_BATCH)


def _digest(leaf: Any) -> str:
    array = np.ascontiguousarray(jax.random.key_data(leaf) if _is_key(leaf) else leaf)
    digest = hashlib.sha256(array.tobytes()).hexdigest()
    return f"{array.dtype}{list(array.shape)} with sha256 {digest[:12]}"


def _is_key(leaf: Any) -> bool:
    return jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key)


def _is_spread(leaf: Any) -> bool:
    """Whether it is an array of several processes already."""
    return isinstance(leaf, jax.Array) and not leaf.is_fully_addressable


# -- batches --------------------------------------------------------------------------------------


def whole_shapes(batch: Any, example: Any, leaves: Iterable[tuple[Any, int | None]]) -> Any:
    """Shapes of the whole batch, of which `batch` holds the rows of this process.

    Args:
      batch: has the structure of `example`.
      example: shapes of a whole batch.
      leaves: of the batch, with example axis; None leaves included.
    """
    wholes, structure = jax.tree.flatten(example, is_leaf=is_none)
    leaves = list(leaves)
    if jax.tree.structure(batch, is_leaf=is_none) != structure:
        raise BatchError(
            wanted="a batch of the structure of the workload's example batch",
            got=str(jax.tree.structure(batch))[:300],
            do="Correct the batch, or give the Workload an example like it.",
        )
    pairs = zip(leaves, wholes, strict=True)
    return structure.unflatten(leaf if axis is None or _is_spread(leaf) else whole for (leaf, axis), whole in pairs)


def put(batch: Any, shardings: Any, whole: Any) -> Any:
    """A batch as arrays of several processes.

    `jax.device_put` would send it to all processes, each time, to compare it.

    Args:
      batch: all of it, the same in all processes, or the rows of this one.
      shardings: where its leaves go.
      whole: `batch`, or shapes of the whole of which it has some rows.

    Raises:
      BatchError: it does not hold as many rows as lie on this process's devices.
    """
    return jax.tree_util.tree_map_with_path(_put, batch, shardings, whole, is_leaf=is_none)


def _put(path: Any, leaf: Any, sharding: NamedSharding, whole: Any) -> Any:
    if leaf is None:
        return None
    if _is_spread(leaf) or _is_key(leaf):
        return jax.device_put(leaf, sharding)
    array = np.asarray(leaf, dtype=jax.dtypes.canonicalize_dtype(np.asarray(leaf).dtype))
    if whole is leaf:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
    own = _shape_here(sharding, whole.shape)
    if array.shape != own:
        raise BatchError(
            wanted=f"{path_string(path, root='batch')} of shape {own} from process {jax.process_index()}: the part of "
            f"the example batch's {whole.shape} that lies on its devices",
            got=f"shape {array.shape}",
            do="With per_process_data=True each process gives its own rows; the Workload's batch is an example of "
            "the whole.",
        )
    return jax.make_array_from_process_local_data(sharding, array, whole.shape)


def _shape_here(sharding: NamedSharding, whole: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of the part that lies on this process's devices."""
    here = [index or () for index in sharding.addressable_devices_indices_map(tuple(whole)).values()]
    sizes = []
    for axis, size in enumerate(whole):
        parts = {index[axis].indices(size)[:2] for index in here}
        sizes.append(sum(stop - start for start, stop in parts))
    return tuple(sizes)


def is_none(leaf: Any) -> bool:
    """Whether a batch has nothing there; JAX would take it for structure."""
    return leaf is None


# -- the loop -------------------------------------------------------------------------------------


class _Alone:
    """`Windows` of one process, which asks nobody."""

    def stop(self, window: int, reason: str) -> str:
        return reason

    def ended(self, window: int) -> str:
        return "data ended"


@contextlib.contextmanager
def failing_together() -> Iterator[None]:
    """A context whose error the other processes tell, and end: they would wait for this one for ever."""
    try:
        yield
    except BaseException as error:
        watch = peers()
        if watch is not None and not watch.is_reported:
            watch.tell(Failure(text=f"jaxmem: error: {where_raised(error)}", code=LOST))
        raise


def agreeing_windows(first: int) -> Any:
    """What says after which window of a loop all processes stop: `stop(window, reason)` and `ended(window)`."""
    watch = peers()
    return _Alone() if watch is None else watch.windows(first)
