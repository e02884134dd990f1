"""Budgets on a GPU and a TPU that are not here: host memory is used as the solution says, peaks are within budgets."""

import dataclasses

import jax
import pytest

from benchmarks._stacks import STACKS
from jaxmem.remat import auto
from tests.deviceless.compiling import TARGETS, compile_on

STACK = dataclasses.replace(
    STACKS["gpt"], batch=4, time=128, width=128, heads=4, kv_heads=4, hidden=512, vocabulary=256, layers=4
)


def _memory(target, fn):
    return compile_on(target, jax.value_and_grad(fn), *STACK.shapes()).memory_analysis()


@pytest.mark.parametrize("target", TARGETS)
def test_offloaded_bytes_are_on_the_host(target):
    small = auto(STACK.loss(), 0.1, target=target, objective="flops", offload=True)
    solved = small.solve(*STACK.shapes())
    assert solved.recompute_flops == 0
    assert _memory(target, small).host_temp_size_in_bytes == solved.host_bytes > 0


def test_fewer_kept_bytes_are_fewer_temporaries():
    small = auto(STACK.loss(), 0.1, target="gpu-h100", objective="flops")
    assert _memory("gpu-h100", small).temp_size_in_bytes < 0.5 * _memory("gpu-h100", STACK.loss()).temp_size_in_bytes
