"""The TPU and GPU compilers run here, without a TPU or GPU, and tell programs apart by their memory."""

import importlib.metadata
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from tests.deviceless.compiling import TARGETS, compile_on, device_of, require

# Large enough that the residuals do not fit the TPU's on-chip memory, which does not count as temporaries.
LAYERS, ROWS, WIDTH, HIDDEN, DTYPE = 64, 4096, 128, 512, jnp.bfloat16


def _train_step(remat: bool):
    """One SGD step of a scanned MLP with a hidden layer four times its width."""

    def layer(x, weights):
        up, down = weights
        return x + jnp.tanh(x @ up) @ down, None

    body = jax.checkpoint(layer, prevent_cse=False) if remat else layer

    def loss(params, x):
        x, _ = jax.lax.scan(body, x, params)
        return jnp.mean(x.astype(jnp.float32) ** 2)

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - jnp.asarray(0.1, p.dtype) * g, params, grads), value

    return step


def _temp_bytes(target: str, remat: bool) -> int:
    params = (
        jax.ShapeDtypeStruct((LAYERS, WIDTH, HIDDEN), DTYPE),
        jax.ShapeDtypeStruct((LAYERS, HIDDEN, WIDTH), DTYPE),
    )
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), DTYPE)
    compiled = compile_on(target, _train_step(remat), params, x, donate_argnums=0)
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("target", TARGETS)
def test_checkpointing_each_layer_frees_its_hidden_activations(target):
    """The plain step keeps at least one (ROWS, HIDDEN) array a layer; the checkpointed one keeps only its input."""
    hidden_bytes = LAYERS * ROWS * HIDDEN * jnp.dtype(DTYPE).itemsize
    saved_bytes = _temp_bytes(target, remat=False) - _temp_bytes(target, remat=True)
    # One layer's hidden array is alive again while that layer is recomputed.
    assert saved_bytes >= hidden_bytes * (LAYERS - 1) / LAYERS


@pytest.mark.parametrize(("target", "kind"), [("tpu-v5e:1x1", "TPU v5 lite"), ("gpu-h100", "NVIDIA H100 80GB HBM3")])
def test_the_device_is_the_one_asked_for(target, kind):
    assert device_of(target).device_kind == kind


def test_the_cuda_plugin_is_of_jaxs_own_version():
    """A plugin of another version loads, then fails in ways that do not name the cause."""
    require("jax-cuda12-plugin", "gpu-aot")
    names = ("jaxlib", "jax-cuda12-plugin", "jax-cuda12-pjrt")
    assert {name: importlib.metadata.version(name) for name in names} == dict.fromkeys(names, jax.__version__)


def test_a_skip_here_is_a_failure_in_ci(tmp_path, monkeypatch, pytestconfig):
    """The hook of this folder's conftest, seen at work on a test that skips."""
    (tmp_path / "conftest.py").write_text((pytestconfig.rootpath / "tests/deviceless/conftest.py").read_text())
    (tmp_path / "test_it.py").write_text("import pytest\n\n\ndef test_it():\n    pytest.skip('no compiler')\n")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", f"--rootdir={tmp_path}", str(tmp_path)]
    for ci, returncode in (("true", 1), ("", 0)):
        monkeypatch.setenv("CI", ci)
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == returncode, done.stdout
        assert "no compiler" in done.stdout or not ci
