"""`Target`: what a program is compiled for. This machine's backend, XLA:CPU, or a chip that need not be here."""

import dataclasses
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxmem._shown import Brief
from jaxmem._units import format_bytes
from jaxmem.errors import InputError, UnknownTargetError
from jaxmem.targets._chip import Chip, TpuFacts, memory_fraction
from jaxmem.targets._device_memory import device_memory_bytes, host_memory_bytes
from jaxmem.targets._gpu_compiler import GPU_OPTIONS, gpu_devices
from jaxmem.targets._names import chip_count, parse_name
from jaxmem.targets._tiles import MODERN, Tiles
from jaxmem.targets._tpu_compiler import tpu_devices

# XLA:CPU's default scheduler keeps the temporaries of an unrolled checkpointed model unchanged.
_MEMORY_SCHEDULER = ("xla_cpu_scheduler_type", "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target(Brief, identity=("name", "platform", "memory_bytes", "device_count", "mesh_axes")):
    """What a program is compiled for; equal by value.

    Args:
      name: as the user wrote it.
      platform: the JAX platform whose compiler is used: "cpu", "gpu" or "tpu".
      memory_bytes: bytes that a program may use: those of one device, or of the whole machine on
        "cpu", whose devices share it. None if unknown.
      compiler_options: (name, value) pairs given to the compiler.
      notes: sentences about this target that every report repeats among its warnings.
      chip: row of the chip table; None for this machine's own backend and for "cpu".
      topology: "2x2"; for GPUs slices x hosts x GPUs of a host.
      mesh_axes: (name, size) pairs of `mesh`; empty for one axis "data" over all devices.
      axis_types: types of these axes; empty for automatic ones.

    >>> resolve_target("cpu").platform
    'cpu'
    """

    name: str
    platform: str
    memory_bytes: int | None = None
    compiler_options: tuple[tuple[str, str | bool | int | float], ...] = ()
    notes: tuple[str, ...] = ()
    chip: Chip | None = None
    topology: str | None = None
    mesh_axes: tuple[tuple[str, int], ...] = ()
    axis_types: tuple[AxisType, ...] = ()

    @property
    def deviceless(self) -> bool:
        """Whether the target's devices exist for the compiler only, so that its programs cannot be run here."""
        return self.chip is not None

    @property
    def tiles(self) -> Tiles | None:
        """The tiles in which its compiler stores arrays; None where arrays are dense."""
        facts = self.chip.facts if self.chip is not None else None
        if isinstance(facts, TpuFacts):
            return facts.tiles
        return MODERN if self.platform == "tpu" else None

    @property
    def device_count(self) -> int:
        """Number of JAX devices of a program: all of the topology, or 1 on this machine's own backend."""
        if self.chip is None or self.topology is None:
            return 1
        return chip_count(self.topology) * self.chip.devices_per_chip

    @property
    def devices(self) -> tuple[Any, ...]:
        """The devices to compile for.

        Raises:
          MissingCompilerError: the chip's compiler is not installed, or does not match this JAX.
        """
        if self.chip is None or self.topology is None:
            return tuple(jax.local_devices(backend=self.platform)[:1])
        find = tpu_devices if self.chip.platform == "tpu" else gpu_devices
        return find(self.chip, self.topology)

    @property
    def mesh(self) -> Mesh:
        """The mesh of all `devices` with `mesh_axes`, which `on_target` sets."""
        axes = dict(self.mesh_axes) or {"data": self.device_count}
        devices = np.array(self.devices).reshape(tuple(axes.values()))
        return Mesh(devices, tuple(axes), axis_types=self.axis_types or None)

    def with_mesh(self, **axes: int) -> "Target":
        """The target with other mesh axes, whose sizes must multiply to the number of devices.

        >>> resolve_target("tpu-v5e:4x4").with_mesh(data=4, model=4).mesh_axes
        (('data', 4), ('model', 4))
        """
        if math.prod(axes.values()) != self.device_count:
            raise UnknownTargetError(
                wanted=f"mesh axes whose sizes multiply to the {self.device_count} device(s) of {self.name}",
                got=", ".join(f"{name}={size}" for name, size in axes.items()) or "none",
                do="Change an axis, or the topology in the target's name.",
            )
        return dataclasses.replace(self, mesh_axes=tuple(axes.items()), axis_types=())


def resolve_target(name: "str | Target | None" = None) -> Target:
    """The target of a name; None means "local", and a `Target` is returned unchanged.

    "local" is the default backend; programs are compiled exactly as they would run. "cpu" is XLA:CPU with its
    memory-minimising scheduler, whatever the default backend. Other names are a chip and a topology,
    "tpu-v5e:2x2" or "gpu-h100:1x8x8" (slices x hosts x GPUs of a host); their compilers are not loaded yet.

    Raises:
      UnknownTargetError: the name is unknown, or it is "cpu" and JAX was told not to start that backend.
      InputError: the value is not a name.
    """
    if name is not None and not isinstance(name, (str, Target)):
        raise InputError(
            wanted="a target's name, a Target, or None for this machine",
            got=repr(name),
            do='For example target="gpu-h100"; run `jaxmem targets` for all of them.',
        )
    if isinstance(name, Target):
        return name
    if name is None or name == "local":
        return _local()
    if name == "cpu":
        return _cpu()
    chip, topology = parse_name(name)
    return _tpu(name, chip, topology) if chip.platform == "tpu" else _gpu(name, chip, topology)


def _local() -> Target:
    platform = jax.default_backend()
    if platform != "cpu":
        return Target(name="local", platform=platform, memory_bytes=device_memory_bytes(jax.local_devices()[0]))
    note = (
        "XLA:CPU's default scheduler may hide what rematerialisation saves outside a scan: "
        "target cpu compiles with its memory-minimising scheduler."
    )
    return Target(name="local", platform="cpu", memory_bytes=host_memory_bytes(), notes=(note,))


def _cpu() -> Target:
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError as error:
        raise UnknownTargetError(
            wanted="the cpu backend for target 'cpu'",
            got=f"JAX without it ({error})",
            do="Add cpu to JAX_PLATFORMS, for example JAX_PLATFORMS=cuda,cpu.",
        ) from None
    option, value = _MEMORY_SCHEDULER
    note = f"Compiled by XLA:CPU with {option}={value}: bytes differ from a plain CPU run and from a TPU or GPU."
    return Target(
        name="cpu",
        platform="cpu",
        memory_bytes=host_memory_bytes(),
        compiler_options=(_MEMORY_SCHEDULER,),
        notes=(note,),
    )


def _tpu(name: str, chip: Chip, topology: str) -> Target:
    usable, hbm = format_bytes(chip.usable_bytes), format_bytes(chip.hbm_bytes)
    note = f"Compiled by libtpu for {chip.kind} without a device; it allows {usable} of a device's {hbm}."
    return Target(
        name=name, platform="tpu", memory_bytes=chip.usable_bytes, notes=(note,), chip=chip, topology=topology
    )


def _gpu(name: str, chip: Chip, topology: str) -> Target:
    usable, hbm = format_bytes(chip.usable_bytes), format_bytes(chip.hbm_bytes)
    note = (
        f"Compiled by XLA:GPU for {chip.kind} without a device, so without autotuning: the kernels chosen, and their "
        f"scratch, may differ on the device. JAX may use {usable} of its {hbm} "
        f"(XLA_PYTHON_CLIENT_MEM_FRACTION={memory_fraction():g})."
    )
    return Target(
        name=name,
        platform="gpu",
        memory_bytes=chip.usable_bytes,
        compiler_options=GPU_OPTIONS,
        notes=(note,),
        chip=chip,
        topology=topology,
    )
