import dataclasses
import os

import jax
import jax.numpy as jnp
import pytest

from jaxmem.analysis import analyze
from jaxmem.errors import UnknownTargetError
from jaxmem.targets import Target, resolve_target
from jaxmem.targets._device_memory import device_memory_bytes


def test_none_is_local_and_local_has_no_compiler_options():
    assert resolve_target(None) == resolve_target("local")
    local = resolve_target("local")
    assert (local.name, local.platform, local.compiler_options) == ("local", "cpu", ())


def test_memory_is_at_most_that_of_the_machine():
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert 0 < resolve_target("cpu").memory_bytes <= physical


def test_a_target_is_taken_as_it_is():
    target = Target(name="small", platform="cpu", memory_bytes=10)
    assert resolve_target(target) is target


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(UnknownTargetError, match=r"local, cpu, tpu-v2, .*; got 'tpu-v9'"):
        resolve_target("tpu-v9")


def test_cpu_asked_of_a_jax_without_it_names_the_cure(monkeypatch):
    def fail(*, backend):
        raise RuntimeError(f"Unknown backend {backend}")

    monkeypatch.setattr(jax, "local_devices", fail)
    with pytest.raises(UnknownTargetError, match="JAX_PLATFORMS=cuda,cpu"):
        resolve_target("cpu")


@pytest.mark.parametrize(("stats", "expected"), [({"bytes_limit": 7}, 7), ({}, None), (None, None)])
def test_device_memory_is_the_allocators_limit(stats, expected):
    device = type("Device", (), {"memory_stats": lambda self: stats})()
    assert device_memory_bytes(device) == expected


def test_the_memory_minimising_scheduler_reaches_the_compiler():
    def block(x, w):
        return x + jnp.tanh(jax.nn.gelu(x @ w[0]) @ w[1])

    def loss(weights, x):
        for w in weights:
            x = jax.checkpoint(block)(x, w)
        return jnp.mean(x**2)

    pair = (jax.ShapeDtypeStruct((64, 256), jnp.float32), jax.ShapeDtypeStruct((256, 64), jnp.float32))
    shapes = [pair] * 4, jax.ShapeDtypeStruct((512, 64), jnp.float32)
    cpu = resolve_target("cpu")
    default = dataclasses.replace(cpu, compiler_options=())
    temps = [analyze(jax.grad(loss), *shapes, target=target).temp_bytes for target in (cpu, default)]
    assert temps[0] != temps[1]


def test_an_option_the_compiler_does_not_know_is_not_swallowed():
    target = Target(name="odd", platform="cpu", compiler_options=(("xla_no_such_option", "1"),))
    with pytest.raises(Exception, match="xla_no_such_option"):
        analyze(jnp.sin, jnp.ones(3), target=target)
