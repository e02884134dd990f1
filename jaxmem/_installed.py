"""Versions of installed distributions, and how to install the compilers."""

import importlib.metadata

INSTALL_TPU = 'Run: pip install -U "jaxmem[tpu-aot]"'
INSTALL_GPU = 'Run: pip install -U "jaxmem[gpu-aot]"'


def version(distribution: str) -> str | None:
    """Version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(text: str | None) -> tuple[int, ...]:
    """The numeric part of a version without trailing zeros, so that 0.12.0 equals 0.12.0.0.

    >>> numbers("0.12.0.1"), numbers("0.11.0.dev20250101"), numbers(None)
    ((0, 12, 0, 1), (0, 11), ())
    """
    parts = []
    for part in (text or "").split("."):
        if not part.isdigit():
            break
        parts.append(int(part))
    while parts and parts[-1] == 0:
        parts.pop()
    return tuple(parts)
