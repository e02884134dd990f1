"""Versions of what is installed here, and how to get the compilers."""

import importlib.metadata

INSTALL_TPU = 'Run: pip install -U "jaxmem[tpu-aot]"'
INSTALL_GPU = 'Run: pip install -U "jaxmem[gpu-aot]"'


def version(distribution: str) -> str | None:
    """Version of an installed distribution, None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def numbers(text: str | None) -> tuple[int, ...]:
    """The numeric part of a version, without trailing zeros: 0.12.0 and 0.12.0.0 are one.

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
