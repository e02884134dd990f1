"""Copies restored arrays into buffers that donation can reuse."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

_NO_MESH = jax.sharding.Mesh(np.empty((), object), ())


def owned(array: jax.Array) -> jax.Array:
    """The array in buffers that a program of XLA has written, and that a donating step reuses; `array` is deleted.

    What Orbax restores may lie in memory that XLA only borrows: on a CPU, a buffer of NumPy that happens to be aligned
    to 64 bytes, which among arrays in memory that was freed before is every fourth to second one; and shards of several
    devices may share one. XLA does not write to borrowed memory, so the first step, though it is given the state as
    donated, allocates these arrays once more. No API of JAX tells borrowed buffers from others, so that each array is
    copied. When this returns the copy is there and the memory of `array` is free: a state restored leaf by leaf takes
    its own bytes and those of one leaf.

    A copy keeps dtype (typed keys, int4, float8), sharding, memory kind and whether it is committed. It is compiled
    once a process for each shape, dtype and sharding. Where an array has shards on other processes, these must call
    this in the same order.

    Args:
      array: of any shape and dtype; deleted.

    >>> restored = jax.device_put(np.arange(3.0))
    >>> copy = owned(restored)
    >>> copy.tolist(), restored.is_deleted()
    ([0.0, 1.0, 2.0], True)
    """
    with jax.set_mesh(_NO_MESH):  # a mesh that the caller has set need not have the array's devices
        copy = _copy(array.sharding if array.committed else None)(array)
    jax.block_until_ready(copy)
    array.delete()
    return copy


@functools.cache
def _copy(sharding: jax.sharding.Sharding | None):
    # Not the identity: with jax.disable_jit that is the array itself. `device_put(may_alias=False)` would compile
    # nothing, and does as well on a CPU; but a program's output is what every later step is given, on any backend.
    return jax.jit(jnp.copy, out_shardings=sharding)
