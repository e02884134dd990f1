"""What must be set before JAX is imported, so that a laptop without accelerators stays quiet."""

import contextlib
import glob
import os
import sys
import tempfile
from collections.abc import Mapping, MutableMapping

# Device files of NVIDIA (Linux, WSL), AMD, Intel, and Cloud TPU (accel: v2-v4; vfio: v5 and later).
ACCELERATOR_FILES = ("/dev/nvidia*", "/dev/dxg", "/dev/kfd", "/dev/dri/renderD*", "/dev/accel*", "/dev/vfio/[0-9]*")

# Lines that XLA's CUDA stub writes before its logging can be configured; no setting silences them.
_NOISE = ("cudart_stub.cc", "All log messages before absl::InitializeLog()")

_applied: dict[str, str] = {}


def defaults(environment: Mapping[str, str], *, has_accelerator: bool) -> dict[str, str]:
    """The settings to add to `environment`; whatever the user has set stays.

    Without an accelerator JAX_PLATFORMS=cpu, since an installed CUDA plugin or libtpu otherwise
    tries to start, prints a traceback, and spoils compiles for targets that are not attached.

    >>> defaults({}, has_accelerator=False)
    {'TF_CPP_MIN_LOG_LEVEL': '3', 'JAX_TRACEBACK_FILTERING': 'off', 'JAX_PLATFORMS': 'cpu'}
    >>> defaults({"JAX_PLATFORMS": "cuda", "TF_CPP_MIN_LOG_LEVEL": "0"}, has_accelerator=False)
    {'JAX_TRACEBACK_FILTERING': 'off'}
    """
    # Without JAX's own frames what JAX raises would be taken for a fault of its caller, jaxmem.
    wanted = {"TF_CPP_MIN_LOG_LEVEL": "3", "JAX_TRACEBACK_FILTERING": "off"}
    if not has_accelerator:
        wanted["JAX_PLATFORMS"] = "cpu"
    return {name: value for name, value in wanted.items() if not environment.get(name)}


def accelerator_files() -> list[str]:
    """Device files that say an accelerator may be attached to this (Linux) machine."""
    return sorted(path for pattern in ACCELERATOR_FILES for path in glob.glob(pattern))


def apply_defaults(environment: MutableMapping[str, str] = os.environ):
    """Sets the defaults in this process; on systems without /dev only the log level."""
    linux = sys.platform.startswith("linux")
    added = defaults(environment, has_accelerator=bool(accelerator_files()) or not linux)
    environment.update(added)
    _applied.update(added)
    jax = sys.modules.get("jax")
    for name in ("JAX_PLATFORMS", "JAX_TRACEBACK_FILTERING"):
        if jax is not None and name in added:
            # JAX read its environment when it was imported; this has no effect on a backend that is up.
            jax.config.update(name.lower(), added[name])


def applied_defaults() -> dict[str, str]:
    """What `apply_defaults` has set in this process."""
    return dict(_applied)


def start_jax():
    """Imports JAX and starts its backend, keeping the known log noise off stderr.

    A process that aborts while its stderr is captured dies without a word. A backend aborts on an unknown name in
    XLA_FLAGS, and one of several processes waits for the others, so its start is captured in neither case.
    """
    jax = import_jax()
    alone = not jax.distributed.is_initialized()
    if os.environ.get("JAX_PLATFORMS") == "cpu" and not os.environ.get("XLA_FLAGS") and alone:
        with _without_noise():
            jax.devices()


def import_jax():
    """JAX, imported without the known log noise."""
    with _without_noise():
        import jax
    return jax


def quiet_collectives():
    """Drops what is printed on stdout: of Gloo, JAX's transport between CPUs, a line for each connection it makes."""
    return _without_noise(1, every_line=True)


@contextlib.contextmanager
def _without_noise(descriptor: int = 2, *, every_line: bool = False):
    """Holds back what is written to a file descriptor, then passes on all but the known noise."""
    stream = {1: sys.stdout, 2: sys.stderr}[descriptor]
    stream.flush()
    with tempfile.TemporaryFile() as held:
        real = os.dup(descriptor)
        os.dup2(held.fileno(), descriptor)
        try:
            yield
        finally:
            stream.flush()
            os.dup2(real, descriptor)
            os.close(real)
            held.seek(0)
            for line in () if every_line else held:
                if not any(noise.encode() in line for noise in _NOISE):
                    os.write(descriptor, line)
