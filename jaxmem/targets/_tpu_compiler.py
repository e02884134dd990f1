"""Compile-only TPU devices, from libtpu; no TPU is needed."""

import functools
import os
import sys
from typing import Any

from jaxmem._installed import INSTALL_TPU, version
from jaxmem.errors import MissingCompilerError
from jaxmem.targets._chip import Chip, TpuFacts

# What libtpu reads when it is loaded. Without these it queries a metadata server that a laptop does not have, complains
# on stderr, and refuses a second process. The accelerator type does not limit the targets: one process may compile for
# any topology, and for several.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_STDERR_LOG_LEVEL": "3",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@functools.cache
def tpu_devices(chip: Chip, topology: str) -> tuple[Any, ...]:
    """The compile-only devices of a slice.

    Raises:
      MissingCompilerError: libtpu is not installed, cannot be loaded, or does not know the chip.
    """
    facts = chip.facts
    assert isinstance(facts, TpuFacts)
    found = version("libtpu")
    if found is None and not os.environ.get("TPU_LIBRARY_PATH"):
        raise MissingCompilerError(wanted=f"libtpu, the compiler of {chip.name}", got="none installed", do=INSTALL_TPU)
    prepare_libtpu()
    from jax.experimental import topologies

    sides = [int(side) for side in topology.split("x")]
    options: dict[str, Any] = {"chips_per_host_bounds": _host_bounds(sides)}
    if facts.config is not None:
        options["chip_config_name"] = facts.config
    try:
        found_topology = topologies.get_topology_desc(
            platform="tpu", topology_name=f"{facts.generation}:{topology}", **options
        )
    except Exception as error:  # jaxlib's class for it differs from version to version
        raise MissingCompilerError(
            wanted=f"libtpu to describe {topology} of {chip.name}",
            got=f"libtpu {found}, which says {' '.join(str(error).split())[:300]!r}",
            do=INSTALL_TPU,
        ) from error
    return tuple(found_topology.devices)


def prepare_libtpu() -> None:
    """Sets the variables that libtpu reads when it is loaded, unless they are set; on a machine with a TPU, none."""
    if "tpu" in os.environ.get("JAX_PLATFORMS", "").split(","):
        return
    if "JAX_FORCE_TPU_INIT" in os.environ or (sys.platform.startswith("linux") and _tpu_attached()):
        return
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)


def _tpu_attached() -> bool:
    return any(os.path.exists(f"/dev/{name}") for name in ("accel0", "vfio/0"))


def _host_bounds(sides: list[int]) -> tuple[int, int, int]:
    """Chips of one host: 2x2, or fewer if a side is 1."""
    return (2 if sides[0] % 2 == 0 else 1, 2 if sides[1] % 2 == 0 else 1, 1)
