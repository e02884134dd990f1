"""One reduction of the gradients a step, and no row moved, in what the compilers of chips make of a sharded batch."""

import functools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh

from jaxmem import MemoryConfig, Workload, make_train_step
from jaxmem.analysis.hlo._collectives import COLLECTIVES
from jaxmem.analysis.hlo._parse import parse_hlo
from jaxmem.targets import resolve_target
from tests.accumulate.problems import stack_loss
from tests.deviceless.compiling import _PACKAGES, require

D, LAYERS, ROWS, K = 128, 3, 256, 4
TARGETS = ("tpu-v5e:2x4", "gpu-h100:1x1x8")
GRADIENT_BYTES = 4 * (LAYERS * D * D + D * 2 * D)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


@functools.cache
def report(target, reduction):
    require(*_PACKAGES[resolve_target(target).platform])
    params = {"w": shape(LAYERS, D, D), "out": shape(D, 2 * D)}
    workload = Workload(stack_loss, params, shape(ROWS, D), optax.sgd(0.1))
    config = MemoryConfig(accumulation_steps=K, gradient_reduction=reduction)
    step = make_train_step(workload, config, mesh=AbstractMesh((8,), ("data",)), target=target)
    return step.report(), parse_hlo(step.compile().as_text())


@pytest.mark.parametrize("target", TARGETS)
def test_once_is_one_reduction_of_each_gradient(target):
    once, module = report(target, "once")
    assert (once.gradient_reduction, once.gradient_reductions) == ("once", 1.0)
    assert once.gradient_reduction_bytes == GRADIENT_BYTES
    assert opcodes(module) == {"all-reduce"}
    each, module = report(target, "each")
    # As many as the compiler leaves in the loop: XLA moves a sum that only adds to an accumulator behind it.
    assert each.gradient_reduction == "each" and 1 <= each.gradient_reductions <= K
    assert each.gradient_reduction_bytes == round(each.gradient_reductions * GRADIENT_BYTES)
    assert opcodes(module) == {"all-reduce"}
    # Every device computes its own rows, forward, backward and the layers again, and not more.
    assert once.flops == each.flops <= 1.05 * (3 * once.forward_flops + once.asked_recompute_flops) / 8


def opcodes(module):
    """What talks to other devices: to reduce, and never to move a row."""
    found = {i.opcode.removesuffix("-start") for c in module.computations.values() for i in c.instructions.values()}
    return found & set(COLLECTIVES)
