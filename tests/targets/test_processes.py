"""In whatever state a process is: JAX started or not, the plugin refused, several at once; and what is missing."""

import importlib.metadata
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from jaxmem.errors import MissingCompilerError
from jaxmem.targets import compile_on, resolve_target
from jaxmem.targets._gpu_compiler import check_installed, gpu_devices, target_config
from jaxmem.targets._tpu_compiler import tpu_devices

COMPILE = """
import sys
import jax, jax.numpy as jnp
if sys.argv[1] == "started":
    jax.devices()
from jax.experimental import topologies
from jaxmem.targets import compile_on, find_chip
from jaxmem.targets._gpu_compiler import target_config
try:
    topologies.get_topology_desc(platform="cuda", target_config=target_config(find_chip("gpu-t4")), topology="1x1x1")
    print("registered")
except NotImplementedError:
    print("not registered")
x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
for target in sys.argv[2:]:
    print(target, compile_on(target, jnp.dot, x, x).memory_analysis().argument_size_in_bytes)
print(jax.default_backend(), float(jnp.sum(jnp.ones(3))))
"""


def start(platforms, *arguments):
    environment = {**os.environ, "JAX_PLATFORMS": platforms, "PYTHONPATH": os.getcwd(), "XLA_FLAGS": ""}
    for name in [name for name in environment if name.startswith("TPU_") or name == "ALLOW_MULTIPLE_LIBTPU_LOAD"]:
        del environment[name]
    command = [sys.executable, "-c", COMPILE, *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def test_every_state_of_jax_and_several_processes_at_once():
    """JAX_PLATFORMS unset and JAX started: the CUDA plugin has refused to register, and is registered after all."""
    targets = ("gpu-h100", "tpu-v5e:1x1", "tpu-v4:2x2x1", "gpu-t4")
    states = [("", "started"), ("", "fresh"), ("cpu", "started")]
    running = [(platforms, start(platforms, when, *targets)) for platforms, when in states]
    for platforms, process in running:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-2000:]
        # When JAX registers the plugin by itself, `_compat.register_cuda_plugin` can go.
        state = "registered" if platforms == "cpu" else "not registered"
        # Others write to stdout too, where JAX looks for devices by itself.
        assert out.splitlines()[-6:] == [state, *(f"{target} {2 * 4 * 256 * 256}" for target in targets), "cpu 3.0"]


def test_here_nothing_is_written_to_stderr(capfd):
    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    compile_on("tpu-v6e", jnp.dot, x, x)
    compile_on("gpu-l4", jnp.dot, x, x)
    assert capfd.readouterr() == ("", "")


@pytest.fixture
def installed(monkeypatch):
    """Lets a test say what is installed; None for what is not."""
    real, said = importlib.metadata.version, {}

    def version(name):
        if name in said and said[name] is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return said.get(name) or real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    return said


def test_a_missing_libtpu_is_one_install_line(installed, monkeypatch):
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    installed["libtpu"] = None
    tpu_devices.cache_clear()
    with pytest.raises(MissingCompilerError, match=r'got none installed\. Run: pip install -U "jaxmem\[tpu-aot\]"$'):
        _ = resolve_target("tpu-v5e").devices


def test_a_missing_or_foreign_cuda_plugin_is_one_install_line(installed):
    gpu_devices.cache_clear()
    installed["jax-cuda12-plugin"] = installed["jax-cuda13-plugin"] = None
    with pytest.raises(MissingCompilerError, match=r'got none installed\. Run: pip install -U "jaxmem\[gpu-aot\]"$'):
        _ = resolve_target("gpu-h100").devices
    installed["jax-cuda12-plugin"], jaxlib = "0.4.30", importlib.metadata.version("jaxlib")
    line = f"got jax-cuda12-plugin 0.4.30. Run: pip install jax-cuda12-plugin=={jaxlib} jax-cuda12-pjrt=={jaxlib}"
    with pytest.raises(MissingCompilerError) as caught:
        check_installed("gpu-h100")
    assert line in str(caught.value)


def test_a_missing_assembler_is_one_install_line(installed, monkeypatch, tmp_path):
    for name in ("nvidia-cuda-nvcc-cu12", "nvidia-cuda-nvcc", "nvidia-cuda-nvcc-cu13"):
        installed[name] = None
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(os.path, "isdir", lambda path: False)
    with pytest.raises(MissingCompilerError, match=r"Run: pip install nvidia-cuda-nvcc-cu12$"):
        check_installed("gpu-h100")


def test_a_gpu_that_its_plugin_cannot_read_says_so(monkeypatch):
    import dataclasses

    from jaxmem.targets import find_chip

    chip = dataclasses.replace(find_chip("gpu-h100"), kind='quote " in it')
    assert '"quote " in it"' in target_config(chip)
    with pytest.raises(MissingCompilerError, match="CUDA plugin to describe gpu-h100; got jax-cuda12-plugin"):
        gpu_devices(chip, "1x1x1")
