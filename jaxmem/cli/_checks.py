"""What `jaxmem doctor` looks at: pure functions from facts to checks, each ok, warn or broken."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from jaxmem._installed import numbers
from jaxmem._units import format_bytes

OLDEST_JAX = (0, 10, 2)
SUPPORTED_PYTHON = ((3, 11), (3, 13))
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint")
GPU_AOT_PACKAGES = ("jax-cuda12-plugin", "nvidia-cuda-nvcc-cu12", "nvidia-cudnn-cu12")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the doctor's report.

    Args:
      name: what was looked at.
      found: what was found, in words.
      status: "ok"; "warn", something may surprise; "broken", jaxmem cannot work.
      cure: what to do, empty for ok.
    """

    name: str
    found: str
    status: Literal["ok", "warn", "broken"] = "ok"
    cure: str = ""

    def warn(self, cure: str, found: str = "") -> "Check":
        """This check, with something that may surprise."""
        return dataclasses.replace(self, status="warn", cure=cure, found=found or self.found)

    def broken(self, cure: str) -> "Check":
        """This check, with something that cannot work."""
        return dataclasses.replace(self, status="broken", cure=cure)


def check_python(version: Sequence[int]) -> Check:
    """Whether jaxmem runs, and is tested, on this version of Python.

    >>> check_python((3, 12, 1)).status, check_python((3, 10, 0)).status, check_python((3, 14, 0)).status
    ('ok', 'broken', 'warn')
    """
    (first, last), check = SUPPORTED_PYTHON, Check(name="Python", found=".".join(map(str, version[:3])))
    if tuple(version[:2]) < first:
        return check.broken("Use Python 3.11 or newer.")
    return check.warn("Tested on Python 3.11 to 3.13 only.") if tuple(version[:2]) > last else check


def check_packages(versions: Mapping[str, str | None]) -> list[Check]:
    """The packages that jaxmem imports.

    Args:
      versions: package name → version, None where it is not installed.
    """
    return [_check_package(name, versions) for name in PACKAGES]


def _check_package(name: str, versions: Mapping[str, str | None]) -> Check:
    version, jax = versions.get(name), versions.get("jax")
    check = Check(name=name, found=version or "not installed")
    if version is None:
        return check.broken(f"pip install {name}")
    if name == "jax" and numbers(version) < OLDEST_JAX:
        return check.broken(f'pip install "jax>={".".join(map(str, OLDEST_JAX))}"')
    if name == "jaxlib" and jax and numbers(version) > numbers(jax):
        return check.broken(f"pip install jaxlib=={jax}")
    return check


def check_tpu_compiler(versions: Mapping[str, str | None], pinned: str | None) -> Check:
    """libtpu, the deviceless TPU compiler; `pinned` is the version that JAX's own extra asks for ("0.0.50.*")."""
    version = versions.get("libtpu")
    check = Check(name="libtpu (TPU targets)", found=version or "not installed")
    if version is None:
        return check.warn('pip install "jaxmem[tpu-aot]"')
    if pinned is None or _matches(version, pinned):
        return check
    check = dataclasses.replace(check, found=f"{version}; jax {versions.get('jax')} itself pins {pinned}")
    if numbers(version) > numbers(pinned.removesuffix(".*")):  # a newer compiler reads an older JAX's programs
        return check
    return check.warn('pip install -U "jaxmem[tpu-aot]"')


def check_gpu_compiler(versions: Mapping[str, str | None]) -> Check:
    """The CUDA plugin, its assembler and cuDNN: the deviceless GPU compiler."""
    plugin, jaxlib = versions.get(GPU_AOT_PACKAGES[0]), versions.get("jaxlib")
    check = Check(name="jax-cuda12-plugin (GPU targets)", found=plugin or "not installed")
    if plugin is None:
        return check.warn('pip install "jaxmem[gpu-aot]"')
    if jaxlib and numbers(plugin) != numbers(jaxlib):
        return check.warn(f"pip install jax-cuda12-plugin=={jaxlib}", f"{plugin}, but jaxlib is {jaxlib}")
    missing = [package for package in GPU_AOT_PACKAGES[1:] if versions.get(package) is None]
    if missing:
        return check.warn(f"pip install {' '.join(missing)}", f"{plugin}, without {' and '.join(missing)}")
    return check


def check_backend(probe: Mapping[str, Any], accelerators: Sequence[str]) -> list[Check]:
    """The backend that JAX starts.

    Args:
      probe: what the probing process said: `backend`, `devices`, `memory_bytes`, or `error`.
      accelerators: device files of accelerators on this machine.
    """
    if "error" in probe:
        cure = "Unset XLA_FLAGS and JAX_PLATFORMS and try again; then reinstall jax and jaxlib."
        return [Check(name="backend", found=str(probe["error"])).broken(cure)]
    devices = ", ".join(f"{count} x {kind}" for kind, count in probe["devices"].items())
    check = Check(name="backend", found=f"{probe['backend']}: {devices}")
    if accelerators and probe["backend"] == "cpu":
        cure = "Unset JAX_PLATFORMS, and install jax[cuda12] or jax[tpu], to run on the accelerator."
        check = check.warn(cure, f"{check.found}, though there is {accelerators[0]}")
    memory = probe.get("memory_bytes")
    found = "unknown" if memory is None else f"{format_bytes(memory)} {probe['memory_of']}"
    return [check, Check(name="memory", found=found)]


def check_settings(environment: Mapping[str, str], added: Mapping[str, str]) -> list[Check]:
    """Environment variables that change what JAX does.

    Args:
      environment: of this process.
      added: those that the command line itself has set, since the user had not.
    """
    names = ["JAX_PLATFORMS", "XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64", "JAX_DISABLE_JIT"]
    names += sorted(name for name in environment if name.startswith("XLA_PYTHON_CLIENT_"))
    return [_check_setting(name, environment[name], name in added) for name in names if name in environment]


def _check_setting(name: str, value: str, added: bool) -> Check:
    by = " (set by this command: no accelerator)" if added else ""
    check = Check(name=name, found=f"{value or '(empty)'}{by}")
    if name == "XLA_PYTHON_CLIENT_MEM_FRACTION" and not _is_fraction(value):
        return check.warn("Set a fraction between 0 and 1, such as 0.75.")
    if name == "JAX_DISABLE_JIT" and value.lower() in ("1", "true", "on", "yes", "y", "t"):
        return check.broken("Unset it: without jit there is nothing to analyse.")
    if name == "XLA_FLAGS" and "--xla_force_host_platform_device_count" in value:
        return check.warn("These CPU devices all share this machine's memory.")
    return check


def _is_fraction(text: str) -> bool:
    try:
        return 0 < float(text) <= 1
    except ValueError:
        return False


def pinned_libtpu(requirements: Sequence[str]) -> str | None:
    """The version of libtpu that JAX's requirements name.

    >>> pinned_libtpu(['numpy>=2', 'libtpu==0.0.50.*; extra == "tpu"'])
    '0.0.50.*'
    """
    for requirement in requirements:
        found = re.match(r"libtpu\s*==\s*([0-9.*]+)", requirement)
        if found:
            return found.group(1)
    return None


def _matches(version: str, pin: str) -> bool:
    if pin.endswith(".*"):
        prefix = numbers(pin.removesuffix(".*"))
        return numbers(version)[: len(prefix)] == prefix
    return numbers(version) == numbers(pin)
