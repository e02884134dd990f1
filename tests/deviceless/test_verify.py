"""`verify` with an accelerator's compiler: what moves to the host does."""

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

from jaxmem import MemoryConfig, Policy, Workload, make_train_step
from jaxmem.train import verify
from tests.deviceless.compiling import require

LAYERS, ROWS, WIDTH = 8, 256, 128


def loss(params, x, *, memory):
    def layer(x, w):
        return jnp.sin(jnp.tanh(checkpoint_name(x @ w, "hidden"))), None

    return jnp.mean(jax.lax.scan(memory.block(layer, scanned=True), x, params)[0] ** 2)


def test_offload_moves_bytes_to_the_host_on_a_gpu():
    require("jax-cuda12-plugin", "gpu-aot")
    workload = Workload(loss, jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH, jnp.ones((ROWS, WIDTH)), optax.sgd(0.1))
    step = make_train_step(workload, MemoryConfig(remat=Policy(offload=("hidden",))))
    found = verify(step, target="gpu-h100")
    assert {check.name for check in found.checks if check.verdict != "pass"} == {"backend"}, str(found)
    assert found.passed and not found.verified and found.compared_on == "cpu"  # the GPU's program was not run
    assert found["host"].verdict == "pass" and found.host_temp_bytes >= LAYERS * ROWS * WIDTH * 4
    assert found.temp_bytes < found.reference_temp_bytes
