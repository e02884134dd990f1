"""The record of one chip: its memory, its rates, its missing features, and their sources."""

import dataclasses
import os

from jaxmem._shown import Brief
from jaxmem.targets._tiles import MODERN, Tiles

PCIE_3 = 15_750_000_000
"""Bytes per second in one direction over 16 lanes of PCI Express 3; each later version doubles it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuFacts(Brief):
    """What libtpu needs to know about a TPU.

    Args:
      generation: the TPU's name in libtpu.
      rank: number of dimensions of its torus.
      max_chips: number of chips in the largest slice.
      topologies: topologies on offer, smallest first; libtpu accepts any other of the same rank.
      config: name of the chip configuration that JAX runs in; None for libtpu's default.
      clock_ghz: clock of the matrix units, the unit of the compiler's cycles; None if it is not published.
      tiles: in which its compiler stores arrays.
    """

    generation: str
    rank: int
    max_chips: int
    topologies: tuple[str, ...]
    config: str | None = None
    clock_ghz: float | None = None
    tiles: Tiles = MODERN


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuFacts(Brief):
    """What XLA:GPU would ask the driver about a GPU.

    Args:
      compute_capability: major and minor.
      cores: number of streaming multiprocessors.
      fpus_per_core: float32 units of a multiprocessor.
      threads_per_core: resident threads of a multiprocessor.
      shared_bytes_per_core, shared_bytes_per_block: shared memory of a multiprocessor, and of one block of threads
        that opts in to more than 48 KiB.
      l2_bytes: size of the L2 cache.
      clock_ghz: boost clock.
      accelerated: whether to compile for architecture-specific features (sm_90a, sm_100a).
    """

    compute_capability: tuple[int, int]
    cores: int
    fpus_per_core: int
    threads_per_core: int
    shared_bytes_per_core: int
    shared_bytes_per_block: int
    l2_bytes: int
    clock_ghz: float
    accelerated: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip(Brief, identity=("name", "kind", "platform", "hbm_bytes")):
    """One row of the chip table. Every number is for one JAX *device*, which is half a chip if `devices_per_chip` is 2.

    Args:
      name: as in a target's name, "tpu-v5e".
      kind: JAX's name of the device.
      platform: "tpu" or "gpu".
      hbm_bytes: memory of the device as its driver reports it; for a TPU, as its maker states it.
      compiler_bytes: for a TPU, the bytes that its compiler allows a program; None for a GPU, see `usable_bytes`.
      devices_per_chip: JAX devices in a chip.
      flops_per_second: (dtype, dense peak) pairs; a GPU computes float32 products as "tf32" by default.
      hbm_bytes_per_second: between memory and compute units.
      host_bytes_per_second: to host memory, one direction; None if it is not published.
      interconnect_bytes_per_second: to other devices of the slice or the host, over all links, one direction.
      facts: what the chip's compiler needs to know.
      source: URL of the page with the rates; `note` names the rates that are from elsewhere.
      note: exceptions and surprises.

    >>> from jaxmem.targets import find_chip
    >>> chip = find_chip("tpu-v5e")
    >>> chip.flops("bfloat16"), chip.usable_bytes / 2**30
    (197000000000000, 15.75)
    """

    name: str
    kind: str
    platform: str
    hbm_bytes: int
    compiler_bytes: int | None = None
    devices_per_chip: int = 1
    flops_per_second: tuple[tuple[str, int], ...]
    hbm_bytes_per_second: int
    host_bytes_per_second: int | None
    interconnect_bytes_per_second: int
    facts: TpuFacts | GpuFacts
    source: str
    note: str = ""

    def flops(self, dtype: str) -> int | None:
        """Dense peak FLOP/s of matrix products in a dtype; None if the chip has no units for it."""
        return dict(self.flops_per_second).get(dtype)

    @property
    def usable_bytes(self) -> int:
        """Bytes that a JAX program may use: those that the TPU's compiler allows, or JAX's share of a GPU."""
        if self.compiler_bytes is not None:
            return self.compiler_bytes
        return int(self.hbm_bytes * memory_fraction())

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """Major and minor of a GPU; None for a TPU."""
        return self.facts.compute_capability if isinstance(self.facts, GpuFacts) else None

    @property
    def native_bfloat16(self) -> bool:
        """Whether matrix products in bfloat16 have units of their own: every TPU, GPUs from sm_80 on."""
        return self.compute_capability is None or self.compute_capability >= (8, 0)

    @property
    def native_float8(self) -> bool:
        """Whether matrix products in float8 have units of their own."""
        return self.flops("float8") is not None

    @property
    def cudnn_attention(self) -> bool:
        """Whether cuDNN's flash attention runs: GPUs from sm_80 on.

        https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
        """
        return self.compute_capability is not None and self.compute_capability >= (8, 0)


def tera(**rates: float) -> tuple[tuple[str, int], ...]:
    """(dtype, rate) pairs from rates in units of 1e12 per second.

    >>> tera(bfloat16=197)
    (('bfloat16', 197000000000000),)
    """
    return tuple((dtype, round(rate * 1e12)) for dtype, rate in rates.items())


def memory_fraction() -> float:
    """The share of a GPU that JAX's allocator takes: XLA_PYTHON_CLIENT_MEM_FRACTION, 0.75 unless set.

    JAX itself also reads the newer name XLA_CLIENT_MEM_FRACTION, and that first.
    """
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        try:
            value = float(os.environ.get(name, ""))
        except ValueError:  # unset, or a value that the allocator refuses too; `jaxmem doctor` reports it
            continue
        if 0 < value <= 1:
            return value
    return 0.75
