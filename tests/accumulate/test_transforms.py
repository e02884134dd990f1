"""Inside jit, vmap and grad, over devices, and for many micro-batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem import LossOutput, Max, Sum, WeightedMean
from jaxmem.accumulate import value_and_grad
from tests.accumulate.problems import accumulated, assert_trees_close, token_batch, token_loss, token_params


def test_an_ensemble_of_parameters_under_vmap():
    batch = token_batch([4, 0, 1, 2])
    ensemble = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[token_params(seed) for seed in range(2)])
    out = jax.jit(jax.vmap(value_and_grad(token_loss, 2), in_axes=(0, None)))(ensemble, batch)
    alone = accumulated(token_loss, 2)
    for seed in range(2):
        want = alone(token_params(seed), batch)
        assert_trees_close(jax.tree.map(lambda leaf, i=seed: leaf[i], out), want)


def test_a_batch_of_batches_under_vmap():
    batches = [token_batch([4, 0, 1, 2]), token_batch([1, 2, 3, 0], seed=3)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)
    out = jax.jit(jax.vmap(value_and_grad(token_loss, 4), in_axes=(None, 0)))(token_params(), stacked)
    alone = accumulated(token_loss, 1)
    for i, batch in enumerate(batches):
        assert_trees_close(jax.tree.map(lambda leaf, i=i: leaf[i], out.grads), alone(token_params(), batch).grads)


@pytest.mark.parametrize("k", [1, 2])
def test_the_gradient_of_a_function_of_the_gradient(k):
    """d/da of g(a) = d/dw mean((a w x)^2) = 2 a^2 w mean(x^2): an outer variable closed over by the loss."""
    x, w = jnp.arange(4.0), jnp.float32(3.0)  # mean(x^2) = 3.5

    def gradient(a):
        return value_and_grad(lambda w, x: WeightedMean(((a * w * x) ** 2).sum(), x.size), k)(w, x).grads

    value, slope = jax.jit(jax.value_and_grad(gradient))(jnp.float32(2.0))
    assert float(value) == 2 * 4 * 3 * 3.5 and float(slope) == 4 * 2 * 3 * 3.5


def test_the_signature_is_its_own_so_that_jit_can_donate_by_name():
    fn = jax.jit(value_and_grad(lambda w, x: (w * x).mean(), 2), donate_argnames=("params",))
    assert float(fn(jnp.float32(2.0), jnp.ones(4)).value) == 2.0
    assert value_and_grad(token_loss, 2).__name__ == "token_loss"


def test_the_result_is_a_pytree():
    out = accumulated(token_loss, 2)(token_params(), token_batch([1, 2]))
    doubled = jax.tree.map(lambda leaf: leaf * 2, out)
    assert float(doubled.value) == 2 * float(out.value)


@pytest.mark.parametrize("spec", [PartitionSpec("data"), PartitionSpec(None, "data")], ids=["rows", "columns"])
def test_a_sharded_batch_is_not_moved(spec):
    """Micro-batches are strided so that each device cuts its own rows: no collective but the reduction."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    axis = list(spec).index("data")
    x = np.random.default_rng(0).normal(size=(32, 16) if axis == 0 else (16, 32)).astype(np.float32)

    def loss(w, x):
        x = x if axis == 0 else x.T
        y = jnp.tanh(x @ w)
        return WeightedMean(y.sum(), x.shape[0]) + 0.0 * WeightedMean((y > 0).sum() * 1.0, (x > 0).sum())

    fn = jax.jit(value_and_grad(loss, 4, batch_axes=axis))
    w = jax.device_put(jnp.ones((16, 4)) / 16, NamedSharding(mesh, PartitionSpec()))
    sharded = jax.device_put(x, NamedSharding(mesh, spec))
    text = fn.lower(w, sharded).compile().as_text()
    assert "all-reduce" in text  # the gradient's: the batch really is spread over devices
    for moved in ("all-gather", "all-to-all", "collective-permute"):
        assert moved not in text
    assert_trees_close(fn(w, sharded).grads, accumulated(loss, 1, batch_axes=axis)(jnp.ones((16, 4)) / 16, x).grads)


def test_many_micro_batches_cost_no_more_program_or_memory_than_few():
    """Case 40: K=64 against K=8 with the same micro-batch: HLO text and temps within 1.2 times."""

    def loss(w, x):
        return WeightedMean(jnp.tanh(x @ w).sum(), (x > 0).sum())

    def compiled(k):
        w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (4 * k, 16)))
        return jax.jit(value_and_grad(loss, k)).lower(w, x).compile()

    few, many = compiled(8), compiled(64)
    assert len(many.as_text()) <= 1.2 * len(few.as_text())
    assert many.memory_analysis().temp_size_in_bytes <= 1.2 * few.memory_analysis().temp_size_in_bytes


def test_objectives_and_metrics_cross_jit():
    """A jitted loss returns its terms and metrics as pytrees; constant factors stay constants of the step."""

    @jax.jit
    def loss(w, x):
        return LossOutput(
            0.5 * WeightedMean((w * x).sum(), x.size) + 2.0 * Sum(w), {"max": Max(x.max()), "n": Sum(x.size)}
        )

    out = accumulated(loss, 2)(jnp.float32(2.0), jnp.arange(4.0))
    assert float(out.grads) == 0.5 * 1.5 + 2 * 2  # a Sum adds up over both micro-batches
    assert float(out.metrics["max"]) == 3 and int(out.metrics["n"]) == 4
