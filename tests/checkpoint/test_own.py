"""Restored arrays lie in buffers of XLA's own, which the first step's donation reuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxmem import checkpoint
from jaxmem.checkpoint._own import owned

DEVICES = np.array(jax.devices()[:4])
MESH = Mesh(DEVICES, ("data",))
ROWS, WHOLE = NamedSharding(MESH, PartitionSpec("data")), NamedSharding(MESH, PartitionSpec())
donating = jax.jit(lambda x: x * 2 + 1, donate_argnums=0)


def borrowed(sharding=None, count=1024):
    """An array in memory of NumPy: aligned to 64 bytes, so that JAX on a CPU makes no copy."""
    memory = np.empty(4 * count + 64, np.uint8)
    start = -memory.ctypes.data % 64
    values = memory[start : start + 4 * count].view(np.float32)
    values[:] = np.arange(count)
    return jax.device_put(values, sharding)


def pointers(array):
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def reused(array):
    """Whether a program that the array is donated to writes where it lay."""
    before = pointers(array)
    return pointers(jax.block_until_ready(donating(array))) == before


@pytest.mark.parametrize("sharding", [None, ROWS, WHOLE])
def test_a_borrowed_array_is_not_reused_and_its_copy_is(sharding):
    array = borrowed(sharding)
    assert not reused(array)  # the fault; once JAX reuses it, `owned` can go
    array = borrowed(sharding)
    values, copy = np.array(array), owned(array)
    assert array.is_deleted() and copy.sharding.is_equivalent_to(array.sharding, copy.ndim)
    np.testing.assert_array_equal(copy, values)
    assert len({*pointers(copy)}) == len(copy.addressable_shards) and reused(copy)


def test_a_whole_state_is_reused_after_a_restore(tmp_path):
    state = {f"w{n}": jnp.full(5_000 + n, float(n)) for n in range(16)}  # some would be borrowed
    checkpoint.save(tmp_path, state, number=1)
    restored = checkpoint.restore(tmp_path, state)
    assert all(map(reused, restored.values()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: jax.random.split(jax.random.key(3, impl="rbg"), 4),
        lambda: jax.device_put(jax.random.split(jax.random.key(0), 4), ROWS),
        lambda: jnp.array([1, -2, 3], jnp.int4),
        lambda: jnp.array([1.0, -2.0], jnp.float8_e4m3fn),
        lambda: jnp.array([np.nan, -0.0]),
        lambda: jax.device_put(np.zeros((4, 0), np.float32), WHOLE),
        lambda: jax.device_put(np.arange(8.0), ROWS.with_memory_kind("pinned_host")),
        lambda: jax.device_put(np.arange(8.0), DEVICES[3]),
    ],
)
def test_a_copy_is_the_same_bit_by_bit_and_lies_where_the_array_did(make):
    def data(array):
        return np.asarray(jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array)

    array = make()
    wanted = data(array).tobytes(), array.dtype, array.sharding, array.sharding.memory_kind
    with jax.set_mesh(Mesh(DEVICES[:2], ("model",))):  # the caller's, of other devices
        copy = owned(array)
    assert (data(copy).tobytes(), copy.dtype, copy.sharding, copy.sharding.memory_kind) == wanted
    assert array.is_deleted()


def test_arrays_of_one_shape_and_sharding_are_compiled_once(caplog):
    place = SingleDeviceSharding(DEVICES[1])
    with jax.log_compiles():
        for _ in range(3):
            owned(borrowed(place, count=77))
    assert sum(r.getMessage().startswith("Finished XLA compilation of jit(copy)") for r in caplog.records) == 1


def test_the_restored_array_is_gone_when_its_copy_is_there():
    before = sum(array.nbytes for array in jax.live_arrays())
    kept = [owned(borrowed()) for _ in range(5)]
    assert sum(array.nbytes for array in jax.live_arrays()) - before == sum(array.nbytes for array in kept)


def test_what_disables_jit_changes_nothing():
    with jax.disable_jit():
        array = borrowed()
        assert owned(array).shape == (1024,) and array.is_deleted()
