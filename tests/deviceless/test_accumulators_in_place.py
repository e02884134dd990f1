"""On GPU and TPU compilers, gradients that are added in place need no buffer beside the accumulators."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jaxmem
from jaxmem.accumulate import value_and_grad
from tests.deviceless.compiling import TARGETS, compile_on

LAYERS, WIDTH, ROWS, STEPS = 8, 2560, 8, 4
SIZE = 4 * LAYERS * WIDTH * WIDTH  # 200 MiB: the on-chip memory of a TPU, whose bytes do not count, holds 128
STACK = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)


def loss(stack, x):
    return jaxmem.WeightedMean((lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0] ** 2).sum(), x.shape[0])


def step_bytes(target, steps, in_place):
    """Temporaries of a step of plain gradient descent with so many micro-batches."""

    def step(stack, x):
        return stack - 0.1 * value_and_grad(loss, steps, in_place=in_place)(stack, x).grads

    x = jax.ShapeDtypeStruct((steps * ROWS, WIDTH), jnp.float32)
    return compile_on(target, step, STACK, x, donate_argnums=0).memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("target", TARGETS)
def test_micro_batches_in_place_need_what_a_lone_one_does(target):
    lone, value, in_place = (
        step_bytes(target, 1, None),
        step_bytes(target, STEPS, False),
        step_bytes(target, STEPS, True),
    )
    assert value <= 1.03 * (lone + SIZE)
    # A GPU's compiler may make one layer's gradient before it adds it to its slice.
    assert in_place <= lone + 1.05 * SIZE / LAYERS
    assert in_place <= value - 0.85 * SIZE


def test_accumulators_in_place_are_known_as_such():
    x = jax.ShapeDtypeStruct((STEPS * ROWS, WIDTH), jnp.float32)

    def step(stack, x):
        return stack - 0.1 * value_and_grad(loss, STEPS)(stack, x).grads

    report = jaxmem.analyze(step, STACK, x, target="gpu-h100", donate_argnums=0, arg_kinds={"stack": "parameters"})
    kinds = dict(report.by_kind)
    assert kinds["accumulators"] >= SIZE and kinds.get("gradients", 0) < SIZE / 4
