"""What a call of `multi_steps` costs by the compilers of chips, and that moments in host memory stay there."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.accumulate import multi_steps
from jaxmem.targets import resolve_target
from tests.deviceless.compiling import TARGETS, compile_on

LAYERS, WIDTH = 8, 2048
OPTIMIZER = multi_steps(optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), 4)


def train_step(params, state, x):
    def loss(params):
        out, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, params)
        return jnp.sum(out**2)

    updates, state = OPTIMIZER.update(jax.grad(loss)(params), state, params, weight=x[0, 0])
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("target", TARGETS)
def test_a_call_needs_no_parameter_sized_buffer_but_the_accumulator(target):
    """Temporaries are one gradient and what a layer works with; all of the state is updated in place."""
    params = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
    x = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)
    state = jax.eval_shape(OPTIMIZER.init, params)
    memory = compile_on(target, train_step, params, state, x, donate_argnums=(0, 1)).memory_analysis()
    gradient = 4 * LAYERS * WIDTH * WIDTH
    assert memory.alias_size_in_bytes >= 4 * gradient  # parameters, accumulators, two moments
    assert memory.temp_size_in_bytes <= 1.4 * gradient


@pytest.mark.parametrize("target", ["tpu-v5e:2x2", "gpu-h100:1x1x4"])
def test_accumulators_made_inside_jit_are_sharded_as_the_parameters(target):
    sharding = NamedSharding(resolve_target(target).mesh, PartitionSpec("data"))
    params = jax.ShapeDtypeStruct((256, 128), jnp.bfloat16, sharding=sharding)
    made = compile_on(target, OPTIMIZER.init, params).output_shardings
    assert made.acc_grads.spec == sharding.spec


def test_moments_in_host_memory_are_read_and_written_there():
    mesh = resolve_target(TARGETS[0]).mesh  # a GPU's compiler, without the GPU, counts host memory as its own

    def placed(tree, memory):
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=memory)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    params = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    state = jax.eval_shape(OPTIMIZER.init, params)
    state = placed(state, "device")._replace(inner_opt_state=placed(state.inner_opt_state, "pinned_host"))

    def update(grads, state):
        return OPTIMIZER.update(grads, state, grads)

    grads = placed(params, "device")
    where = jax.tree.map(lambda leaf: leaf.sharding, (grads, state))
    compiled = compile_on(TARGETS[0], update, grads, state, donate_argnums=1, out_shardings=where)
    memory, moments = compiled.memory_analysis(), 2 * 4 * 256 * 256
    assert moments <= memory.host_argument_size_in_bytes <= 1.01 * moments
    assert memory.host_alias_size_in_bytes == memory.host_output_size_in_bytes == memory.host_argument_size_in_bytes
