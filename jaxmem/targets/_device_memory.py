"""Memory of this machine: how many bytes its devices and host have, use, and have set aside."""

import ctypes
import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxmem._shown import Brief
from jaxmem.targets._chip import memory_fraction
from jaxmem.targets._names import CHIPS

# The allocator's settings; JAX reads them once, when the backend starts.
_SETTINGS = (
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)

# Container limits, cgroup v2 and v1; either file may be absent or hold "max".
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")

_RESIDENT, _MOST = (re.compile(rf"^{name}:\s*(\d+) kB", re.MULTILINE) for name in ("VmRSS", "VmHWM"))


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceMemory(Brief):
    """Bytes of one device; None where its backend keeps no statistics, as on XLA:CPU.

    Args:
      device: JAX's name of the device.
      in_use_bytes: bytes of live arrays and running programs.
      peak_bytes: the largest `in_use_bytes` since the process started.
      pool_bytes: bytes that the allocator has reserved on the device; `nvidia-smi` shows these, whatever is in use.
      limit_bytes: the most that the allocator may reserve.
      notes: sentences about what these numbers do not show.
    """

    device: str
    in_use_bytes: int | None = None
    peak_bytes: int | None = None
    pool_bytes: int | None = None
    limit_bytes: int | None = None
    notes: tuple[str, ...] = ()


def device_memory(device: Any = None) -> DeviceMemory:
    """The bytes in use on `device` (default: the first of this machine) and the bytes that its allocator has reserved.

    This starts JAX's backend, so the allocator must be configured before.

    >>> import jax
    >>> memory = device_memory(jax.devices("cpu")[0])
    >>> memory.in_use_bytes, memory.notes[0]
    (None, 'cpu keeps no statistics of its memory.')
    """
    device = jax.local_devices()[0] if device is None else device
    stats = memory_stats(device)
    if not stats:
        return DeviceMemory(device=device.device_kind, notes=(f"{device.platform} keeps no statistics of its memory.",))
    limit = stats.get("bytes_limit")
    return DeviceMemory(
        device=device.device_kind,
        in_use_bytes=stats.get("bytes_in_use"),
        peak_bytes=stats.get("peak_bytes_in_use"),
        pool_bytes=stats.get("pool_bytes"),
        limit_bytes=limit,
        notes=late_settings(_at_start(), device.device_kind, limit) if device.platform == "gpu" else (),
    )


def process_memory() -> DeviceMemory:
    """The resident memory of this whole process, Python and every library included; all None where Linux does not tell.

    >>> process_memory().device
    'this process'
    """
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        text = ""
    in_use, peak = (1024 * int(found[1]) if (found := field.search(text)) else None for field in (_RESIDENT, _MOST))
    # The kernel counts pages for each thread and adds them up now and then: the maximum may lag behind.
    peak = max(in_use, peak) if in_use is not None and peak is not None else peak
    return DeviceMemory(device="this process", in_use_bytes=in_use, peak_bytes=peak)


def restart_process_peak() -> bool:
    """Gives freed pages back and lets the kernel begin its maximum of this process anew; False where it does not."""
    try:
        ctypes.CDLL(None).malloc_trim(0)  # else what was freed counts as in use, and again when it is
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return False
    return True


def late_settings(at_start: Mapping[str, str] | None, kind: str, limit_bytes: int | None) -> tuple[str, ...]:
    """Sentences on allocator settings in the environment that were changed after the backend started.

    Args:
      at_start: environment of the process at its start; None if unknown.
      kind: JAX's name of the device.
      limit_bytes: limit of its allocator.
    """
    notes = []
    chip = next((chip for chip in CHIPS if chip.kind == kind), None)
    asked = memory_fraction()
    if chip is not None and limit_bytes and abs(limit_bytes / chip.hbm_bytes - asked) > 0.05:
        notes.append(
            f"The allocator may take {limit_bytes / chip.hbm_bytes:.0%} of the device, not the {asked:.0%} that the "
            "environment asks for now: it was read when JAX's backend started. Set it before, and start again."
        )
    if at_start is not None:
        notes += [
            f"{name} was changed after this process began: that counts only if it was before JAX's backend started."
            for name in _SETTINGS
            if os.environ.get(name) != at_start.get(name)
        ]
    return tuple(notes)


def _at_start() -> dict[str, str] | None:
    """The environment at the start of this process, on Linux; None elsewhere."""
    try:
        text = Path("/proc/self/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in os.fsdecode(text).split("\0"))
    return {name: value for name, _, value in pairs if name}


def memory_stats(device) -> dict[str, int]:
    """Statistics of a device's allocator; empty if it keeps none."""
    try:
        return device.memory_stats() or {}
    except Exception:  # each backend without statistics raises its own error
        return {}


def device_memory_bytes(device) -> int | None:
    """The limit of a device's allocator in bytes; None if unknown."""
    return memory_stats(device).get("bytes_limit") or None


def host_memory_bytes() -> int | None:
    """Physical memory of this machine in bytes, or its container's limit if that is smaller."""
    try:
        physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None
    limits = [physical] if physical > 0 else []
    for name in _CGROUP_LIMITS:
        try:
            limits.append(int(Path(name).read_text()))
        except (OSError, ValueError):
            continue
    return min((limit for limit in limits if limit > 0), default=None)
