"""How many bytes a device, or this machine, has."""

import os
from pathlib import Path

# Container limits, cgroup v2 and v1; either file may be absent or hold "max".
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_stats(device) -> dict[str, int]:
    """What a device's allocator says; empty where it keeps no statistics."""
    try:
        return device.memory_stats() or {}
    except Exception:  # backends without statistics raise errors of their own making
        return {}


def device_memory_bytes(device) -> int | None:
    """The allocator's limit of a device in bytes, or None where it does not say."""
    return memory_stats(device).get("bytes_limit") or None


def host_memory_bytes() -> int | None:
    """Physical memory of this machine in bytes, or its container's limit where that is less."""
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
