"""Reads what a compiled program says about its memory, and notices when it says nothing."""

import dataclasses

import jax
import numpy as np

from jaxmem.targets import read_back


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryBytes:
    """The compiler's memory analysis in bytes per device; None where it gives no number."""

    argument_bytes: int | None = None
    output_bytes: int | None = None
    temp_bytes: int | None = None
    alias_bytes: int | None = None
    generated_code_bytes: int | None = None
    host_argument_bytes: int | None = None
    host_output_bytes: int | None = None
    host_temp_bytes: int | None = None
    host_alias_bytes: int | None = None
    compiler_peak_bytes: int | None = None

    @property
    def sum_bytes(self) -> int | None:
        """Arguments, outputs and temporaries, less the outputs that reuse an argument's buffer."""
        if self.argument_bytes is None or self.output_bytes is None or self.temp_bytes is None:
            return None
        return self.argument_bytes + self.output_bytes + self.temp_bytes - (self.alias_bytes or 0)

    @property
    def any_host_bytes(self) -> int:
        """Those on the host, of whatever use; 0 where the compiler gives no number."""
        used = (self.host_argument_bytes, self.host_output_bytes, self.host_temp_bytes)
        return sum(size or 0 for size in used) - (self.host_alias_bytes or 0)


def read_memory(compiled) -> MemoryBytes | None:
    """The memory analysis of a `jax.stages.Compiled`, or None where it is missing or cannot be right.

    A backend without one returns None, raises, or fills its fields with 0 or -1.
    """
    stats, _ = read_back(lambda: compiled.memory_analysis())
    values = {field.name: getattr(stats, _in_xla(field.name), None) for field in dataclasses.fields(MemoryBytes)}
    known = {name: int(value) for name, value in values.items() if value is not None}
    essential = [known.get(name, -1) for name in ("argument_bytes", "output_bytes", "temp_bytes")]
    if min(essential) < 0 or not any(known.values()):
        return None
    return MemoryBytes(**{name: value for name, value in known.items() if value >= 0})


def _in_xla(name: str) -> str:
    """What XLA calls a field."""
    return "peak_memory_in_bytes" if name == "compiler_peak_bytes" else name.replace("_bytes", "_size_in_bytes")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArgumentBytes:
    """Bytes per device of what a program is called with, from avals and shardings.

    Args:
      total: of all arguments, also of those that the program does not use.
      donated: of the donated ones.
      host: of those that lie on the host.
    """

    total: int
    donated: int
    host: int = 0


def argument_bytes(compiled) -> ArgumentBytes | None:
    """Bytes of the arguments, or None where the object does not describe them."""
    infos = jax.tree.leaves(getattr(compiled, "args_info", None))
    if not infos or not all(hasattr(info, "shape") and hasattr(info, "dtype") for info in infos):
        return None
    shardings = _leaves(getattr(compiled, "input_shardings", None))
    if len(shardings) != len(infos):
        shardings = [None] * len(infos)
    sizes = [shard_bytes(info, sharding) for info, sharding in zip(infos, shardings, strict=True)]
    donated = [size for info, size in zip(infos, sizes, strict=True) if getattr(info, "donated", False)]
    host = [s for s, sharding in zip(sizes, shardings, strict=True) if _on_host(sharding)]
    return ArgumentBytes(total=sum(sizes), donated=sum(donated), host=sum(host))


def _on_host(sharding) -> bool:
    """Whether arrays lie beside a device's own memory. A CPU's own is "unpinned_host"."""
    return getattr(sharding, "memory_kind", None) == "pinned_host"


def shard_bytes(aval, sharding) -> int:
    """Bytes that one device holds of an array; without a sharding, of the whole array."""
    shape = tuple(aval.shape)
    if sharding is not None:
        shape = sharding.shard_shape(shape)
    return int(np.prod(shape, dtype=np.int64)) * aval.dtype.itemsize


def used_devices(compiled) -> list:
    """The devices that a compiled program runs on; empty where it has neither arguments nor outputs."""
    shardings = [*_leaves(getattr(compiled, "input_shardings", None))]
    shardings += _leaves(getattr(compiled, "output_shardings", None))
    sets = [s.device_set for s in shardings if hasattr(s, "device_set")]
    return sorted(max(sets, key=len), key=lambda device: device.id) if sets else []


def _leaves(tree) -> list:
    # An argument that the program does not use has None for a sharding.
    return jax.tree.leaves(tree, is_leaf=lambda leaf: leaf is None)
