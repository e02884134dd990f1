"""Every tiny example trains: the losses fall, and neither remat nor accumulation changes them."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import gpt, llama, resnet_batchnorm, vit_nnx
from jaxmem import MemoryConfig, make_train_step

EXAMPLES = {
    "gpt": functools.partial(gpt.workload, layers=2, seq=32, learning_rate=1e-2),
    "llama": functools.partial(llama.workload, layers=2, seq=32, learning_rate=1e-2),
    "vit_nnx": functools.partial(vit_nnx.workload, layers=1, dropout=0.0, learning_rate=1e-2),
    "resnet_batchnorm": functools.partial(resnet_batchnorm.workload, width=8, batch=32),
}
PLAIN, LEAN = MemoryConfig(), MemoryConfig(accumulation_steps=2, remat="full")


@functools.cache
def workload_and_start(name):
    """An example and its first state."""
    workload = EXAMPLES[name]()
    return workload, make_train_step(workload).init()


compiled_step = functools.cache(make_train_step)


def train(workload, config, state, num_steps):
    """The loss of each step from a copy of `state`, for a step donates what it is given; and the last state."""
    step, state, values = compiled_step(workload, config), jax.tree.map(jnp.copy, state), []
    for window in range(num_steps):
        state, metrics = step(state, workload.data(window))
        values.append(metrics["loss"])
    return np.array(values), state


@pytest.mark.parametrize("name", ["gpt", "llama", "vit_nnx"])
def test_trains_the_same_under_accumulation_and_remat(name):
    workload, start = workload_and_start(name)
    plain, _ = train(workload, PLAIN, start, 15)
    lean, _ = train(workload, LEAN, start, 15)
    assert plain[-3:].mean() < 0.85 * plain[0]
    np.testing.assert_allclose(lean, plain, atol=1e-4)


def test_resnet_trains_and_its_statistics_are_updated_once_under_remat():
    # Each micro-batch is normalised by its own statistics, so only runs of one K are compared.
    workload, start = workload_and_start("resnet_batchnorm")
    losses, _ = train(workload, LEAN, start, 25)
    assert losses[-3:].mean() < 0.85 * losses[0]

    _, lean = train(workload, LEAN, start, 1)
    _, kept = train(workload, MemoryConfig(accumulation_steps=2), start, 1)
    assert jax.tree.structure(lean.state) == jax.tree.structure(start.state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), lean.state, kept.state)
    moved = jax.tree.map(lambda a, b: np.any(np.asarray(a) != np.asarray(b)), lean.state, start.state)
    assert all(jax.tree.leaves(moved))


def test_dropout_draws_the_same_masks_when_recomputed():
    workload = vit_nnx.workload(layers=1, batch=8, dropout=0.5)
    _, start = workload_and_start("vit_nnx")  # dropout has no parameters, and at rate 0 the same streams
    plain, lean = (train(workload, MemoryConfig(accumulation_steps=2, remat=r), start, 2)[0] for r in ("none", "full"))
    np.testing.assert_allclose(lean, plain, atol=1e-5)


@pytest.mark.parametrize("make", [gpt.workload, vit_nnx.workload])
def test_dropout_is_on_while_training(make):
    on, off = (make_train_step(make(layers=1, dropout=rate)).lower().as_text() for rate in (0.1, 0.0))
    assert on.count("threefry") > off.count("threefry")


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_matmul_is_bfloat16_if_asked(name):
    config = MemoryConfig(accumulation_steps=2, remat="dots", precision="bfloat16")
    text = make_train_step(EXAMPLES[name](), config).lower().as_text()
    matmuls = re.findall(r"stablehlo\.(?:dot_general|convolution)\b.* : \(tensor<([^>]*)>, tensor<([^>]*)>\) ->", text)
    assert len(matmuls) >= 20
    assert {shape.split("x")[-1] for operands in matmuls for shape in operands} == {"bf16"}


@pytest.mark.parametrize("module", [gpt, llama, vit_nnx, resnet_batchnorm])
def test_data_is_a_function_of_the_window(module):
    data = module.workload().data
    once, again, next_one = data(7), data(7), data(8)
    jax.tree.map(np.testing.assert_array_equal, once, again)
    assert all(np.any(a != b) for a, b in zip(once.values(), next_one.values(), strict=True))
