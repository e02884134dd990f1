"""Small training steps, and how they are lowered for CPU, GPU and TPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.deviceless.compiling import device_of

F32 = jnp.float32


def matmul_step(params, momentum, x):
    """One step of a scanned MLP with momentum; parameters and momentum are donated."""

    def body(h, w):
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    return _step(lambda p: jnp.mean(jax.lax.scan(body, x, p)[0] ** 2), params, momentum)


def elementwise_step(params, momentum, x):
    """The same without a matmul, which takes a TPU's compiler a minute."""

    def body(h, w):
        return h + jnp.tanh(h * w), None

    return _step(lambda p: jnp.mean(jax.lax.scan(body, x, p)[0] ** 2), params, momentum)


def _step(loss: Callable, params, momentum):
    value, grads = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, value


def program(platform: str) -> tuple[Callable, tuple]:
    """The step and the shapes of its arguments; a TPU's are too large for its on-chip memory."""
    if platform == "tpu":
        params = jax.ShapeDtypeStruct((8, 1024), F32)
        return elementwise_step, (params, params, jax.ShapeDtypeStruct((16384, 1024), F32))
    params = {"up": jax.ShapeDtypeStruct((4, 64, 256), F32), "down": jax.ShapeDtypeStruct((4, 256, 64), F32)}
    return matmul_step, (params, params, jax.ShapeDtypeStruct((64, 64), F32))


def lower(target: str, step: Callable, shapes: tuple) -> tuple[jax.stages.Lowered, dict]:
    """The lowered step, and the options that it is compiled with; `target` is "cpu" or a deviceless one."""
    jitted = jax.jit(step, donate_argnums=(0, 1))
    if target == "cpu":
        return jitted.lower(*shapes), {"xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}
    sharding = NamedSharding(Mesh(np.array([device_of(target)]), ("device",)), PartitionSpec())
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), shapes)
    platform = "cuda" if target.startswith("gpu") else "tpu"
    options = {"xla_gpu_autotune_level": 0} if platform == "cuda" else {}
    return jitted.trace(*shapes).lower(lowering_platforms=(platform,)), options
