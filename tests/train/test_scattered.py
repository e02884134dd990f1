"""Gradients of an embedding, scattered and summed over micro-batches and devices, against numpy's `add.at`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import MemoryConfig, Workload, make_train_step

VOCABULARY, WIDTH, ROWS, LENGTH = 24, 4, 16, 8


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
@pytest.mark.parametrize("table_spec", [P("data"), P()], ids=["sharded vocabulary", "whole table"])
@pytest.mark.parametrize("reduction", ["each", "auto"])
def test_scattered_gradients_are_those_of_add_at(reduction, table_spec, micro_batches):
    mesh, rng = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,)), np.random.default_rng(0)
    ids = rng.integers(0, VOCABULARY, (ROWS, LENGTH)).astype(np.int32)
    ids[:, 0] = 3  # repeated, in every micro-batch and on every device
    weights = (rng.integers(-8, 8, (ROWS, LENGTH, WIDTH)) / 16).astype(np.float32)
    batch = {"ids": ids, "weights": weights}
    table = jax.device_put(jnp.zeros((VOCABULARY, WIDTH)), NamedSharding(mesh, table_spec))
    workload = Workload(
        lambda table, b: jnp.sum(table[b["ids"]] * b["weights"], (1, 2)).mean(), table, batch, optax.sgd(1.0)
    )
    config = MemoryConfig(accumulation_steps=micro_batches, gradient_reduction=reduction)
    step = make_train_step(workload, config, mesh=mesh)
    state, _ = step(step.init(), batch)
    expected = np.zeros((VOCABULARY, WIDTH), np.float32)
    np.add.at(expected, ids, weights)
    np.testing.assert_array_equal(-np.asarray(state.params) * ROWS, expected)  # sixteenths add up exactly
