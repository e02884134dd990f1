"""Compile-only GPU devices, from XLA:GPU in JAX's CUDA plugin; no GPU is needed."""

import functools
import os
import shutil
from typing import Any

from jaxmem import _compat
from jaxmem._installed import INSTALL_GPU, numbers, version
from jaxmem.errors import MissingCompilerError
from jaxmem.targets._chip import Chip, GpuFacts

# Autotuning runs kernels, so it needs a device. It is turned off by an option: XLA_FLAGS would be read once, for all.
GPU_OPTIONS = (("xla_gpu_autotune_level", 0),)
# Versions of cuDNN and CUDA whose kernels a program may call; the wheels of the supported JAX versions require them.
_CUDNN, _CUDA = (9, 10, 0), (12, 9, 0)


@functools.cache
def gpu_devices(chip: Chip, topology: str) -> tuple[Any, ...]:
    """The compile-only devices of a topology, slices x hosts x GPUs.

    Raises:
      MissingCompilerError: the CUDA plugin or its assembler is missing, or the plugin is not of this JAX.
    """
    check_installed(chip.name)
    from jax.experimental import topologies

    def describe():
        return topologies.get_topology_desc(platform="cuda", target_config=target_config(chip), topology=topology)

    try:
        try:
            return tuple(describe().devices)
        except NotImplementedError:
            # JAX started without JAX_PLATFORMS=cpu, and the plugin, finding no driver, did not register itself.
            _compat.register_cuda_plugin()
            return tuple(describe().devices)
    except Exception as error:  # jaxlib's class for it differs from version to version
        raise MissingCompilerError(
            wanted=f"JAX's CUDA plugin to describe {chip.name}",
            got=f"jax-cuda12-plugin {version('jax-cuda12-plugin')}, which says {' '.join(str(error).split())[:300]!r}",
            do=f"Set JAX_PLATFORMS=cpu before Python starts; if that does not help: {INSTALL_GPU}",
        ) from error


def check_installed(name: str) -> None:
    """MissingCompilerError if a part of the GPU compiler is not installed, or versions do not match."""
    wanted = f"the CUDA plugin of JAX {version('jaxlib')}, which compiles for {name}"
    plugin = version("jax-cuda12-plugin") or version("jax-cuda13-plugin")
    if plugin is None:
        raise MissingCompilerError(wanted=wanted, got="none installed", do=INSTALL_GPU)
    package = "jax-cuda12-plugin" if version("jax-cuda12-plugin") else "jax-cuda13-plugin"
    # A plugin of another version loads, then fails in ways that do not name the cause.
    if numbers(version(package)) != numbers(version("jaxlib")):
        right = version("jaxlib")
        raise MissingCompilerError(
            wanted=wanted,
            got=f"{package} {plugin}",
            do=f"Run: pip install {package}=={right} {package.replace('plugin', 'pjrt')}=={right}",
        )
    if not _has_assembler():
        raise MissingCompilerError(
            wanted=f"CUDA's assembler and libdevice, which XLA needs to compile for {name}",
            got="no nvidia-cuda-nvcc-cu12, no ptxas on PATH, no CUDA_HOME",
            do="Run: pip install nvidia-cuda-nvcc-cu12",
        )


def _has_assembler() -> bool:
    packages = ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu13")
    places = (os.environ.get("CUDA_HOME", ""), "/usr/local/cuda")
    return any(map(version, packages)) or shutil.which("ptxas") is not None or any(map(os.path.isdir, places))


def target_config(chip: Chip) -> str:
    """XLA's description of the GPU, as it would read it off the driver: a text of stream_executor.GpuTargetConfigProto.

    >>> from jaxmem.targets import find_chip
    >>> print(target_config(find_chip("gpu-t4")).splitlines()[-1])
    device_description_str: "Tesla T4"
    """
    facts = chip.facts
    assert isinstance(facts, GpuFacts)
    major, minor = facts.compute_capability
    extension = " feature_extension: ACCELERATED_FEATURES" if facts.accelerated else ""
    fields = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 48 * 2**10,
        "shared_memory_per_core": facts.shared_bytes_per_core,
        "shared_memory_per_block_optin": facts.shared_bytes_per_block,
        "threads_per_core_limit": facts.threads_per_core,
        "core_count": facts.cores,
        "fpus_per_core": facts.fpus_per_core,
        "block_dim_limit_x": 2**31 - 1,
        "block_dim_limit_y": 2**16 - 1,
        "block_dim_limit_z": 2**16 - 1,
        "memory_bandwidth": chip.hbm_bytes_per_second,
        "l2_cache_size": facts.l2_bytes,
        "clock_rate_ghz": facts.clock_ghz,
        "device_memory_size": chip.hbm_bytes,
        "registers_per_core_limit": 2**16,
        "registers_per_block_limit": 2**16,
    }
    lines = ["gpu_device_info {", *(f"  {name}: {value}" for name, value in fields.items())]
    lines += [f"  cuda_compute_capability {{ major: {major} minor: {minor}{extension} }}", "}"]
    lines.append('platform_name: "CUDA"')
    for name, (major, minor, patch) in (("dnn_version_info", _CUDNN), ("runtime_version", _CUDA)):
        lines.append(f"{name} {{ major: {major} minor: {minor} patch: {patch} }}")
    lines.append(f'device_description_str: "{chip.kind}"')
    return "\n".join(lines)
