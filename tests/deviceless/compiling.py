"""`compile_on` for tests: a function through the compiler of a chip that this machine does not have."""

import importlib.metadata
from collections.abc import Callable

import jax
import pytest

from jaxmem import targets

TARGETS = ("tpu-v5e:1x1", "gpu-h100")
_PACKAGES = {"tpu": ("libtpu", "tpu-aot"), "gpu": ("jax-cuda12-plugin", "gpu-aot")}


def require(distribution: str, extra: str) -> None:
    """Skips where the compiler's package is missing; the conftest here makes that a failure under CI=true."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed: pip install '.[{extra}]'")


def device_of(target: str) -> jax.Device:
    """The compile-only device of a one-device target."""
    resolved = targets.resolve_target(target)
    require(*_PACKAGES[resolved.platform])
    (device,) = resolved.devices
    return device


def compile_on(target: str, fn: Callable, *shapes, compiler_options: dict | None = None, **jit_options):
    """`jaxmem.targets.compile_on`; a missing compiler skips the test, which fails it in CI."""
    require(*_PACKAGES[targets.resolve_target(target).platform])
    return targets.compile_on(target, fn, *shapes, compiler_options=compiler_options, **jit_options)
