"""Which compilers are installed here, and how to get them."""

import importlib.metadata

INSTALL_TPU = 'Run: pip install -U "jaxmem[tpu-aot]"'
INSTALL_GPU = 'Run: pip install -U "jaxmem[gpu-aot]"'


def version(distribution: str) -> str | None:
    """Version of an installed distribution, None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def installed_numbers(distribution: str) -> tuple[int, ...]:
    """The numeric part of an installed version without trailing zeros: 0.12.0 and 0.12.0.0 are one."""
    numbers = []
    for part in (version(distribution) or "").split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
