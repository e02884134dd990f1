"""`compile_on`: a function through the compiler of a chip that this machine does not have."""

import functools
import importlib.metadata
import os
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

TARGETS = ("tpu-v5e:1x1", "gpu-h100")

# libtpu reads these when it is first loaded; there is no metadata server here, nor a TPU to ask.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-1")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("TPU_STDERR_LOG_LEVEL", "3")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # pytest-xdist's workers all load it


def require(distribution: str, extra: str) -> None:
    """Skips where the compiler's package is missing; the conftest here makes that a failure under CI=true."""
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{distribution} is not installed: pip install '.[{extra}]'")


@functools.cache
def device_of(target: str) -> jax.Device:
    """The compile-only device of a one-chip target, one of `TARGETS`."""
    if target == "gpu-h100":
        require("jax-cuda12-plugin", "gpu-aot")
        config = (Path(__file__).parent / "h100.textproto").read_text()
        topology = topologies.get_topology_desc(platform="cuda", target_config=config, topology="1x1x1")
    elif target == "tpu-v5e:1x1":
        require("libtpu", "tpu-aot")
        # A topology of one chip needs its host's bounds spelled out.
        topology = topologies.get_topology_desc(
            platform="tpu", topology_name="v5e:1x1", chips_per_host_bounds=(1, 1, 1)
        )
    else:
        raise ValueError(f"wanted one of {TARGETS}, got {target!r}")
    (device,) = topology.devices
    return device


def compile_on(target: str, fn: Callable, *shapes, compiler_options: dict | None = None, **jit_options):
    """`fn`, jitted with `jit_options`, compiled for `target`.

    Args:
      target: one of `TARGETS`.
      fn: a function of arrays, or one that is jitted already (then without `jit_options`).
      *shapes: pytrees of arrays or `jax.ShapeDtypeStruct`; only their shapes and dtypes are read.
      compiler_options: XLA's, e.g. `{"xla_dump_to": folder}`.

    Returns:
      `jax.stages.Compiled`, which has `memory_analysis()` and `as_text()` but cannot be called here.
    """
    sharding = NamedSharding(Mesh(np.array([device_of(target)]), ("device",)), PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    platform, options = "tpu", dict(compiler_options or {})
    if target.startswith("gpu"):
        platform = "cuda"
        options.setdefault("xla_gpu_autotune_level", 0)  # autotuning runs kernels, so it needs a device
    jitted = fn if hasattr(fn, "trace") else jax.jit(fn, **jit_options)
    return jitted.trace(*shapes).lower(lowering_platforms=(platform,)).compile(compiler_options=options)
