"""A run that was saved and restored goes on as if it had never stopped."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

from jaxmem import LossOutput, MemoryConfig, WeightedMean, Workload, make_train_step

X = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def loss(params, batch, *, rng, state):
    kept = jax.random.bernoulli(rng, 0.7, batch.shape)
    rows = jnp.sum((jnp.where(kept, batch, 0) @ params["w"] - state["mean"]) ** 2, 1)
    new = {"mean": 0.9 * state["mean"] + 0.1 * batch.mean()}
    return LossOutput(WeightedMean(rows.sum(), rows.size), state=new)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_case_12_a_resumed_run_draws_the_same_random_numbers(tmp_path, precision):
    """maxtext#4343: a key that is not saved makes dropout repeat its masks. Step 6 is the uninterrupted run's."""
    workload = Workload(
        loss, {"w": jnp.ones((4, 2))}, X, optax.adam(0.05), state={"mean": jnp.zeros(())}, rng=jax.random.key(3)
    )
    step = make_train_step(workload, MemoryConfig(accumulation_steps=2, precision=precision))
    state = step.init()
    losses = []
    for _ in range(5):
        state, metrics = step(state, X)
        losses.append(float(metrics["loss"]))
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        resumed = checkpointer.restore(tmp_path / "state", step.init())
    (went_on, metrics), (resumed, again) = step(state, X), step(resumed, X)
    assert float(again["loss"]) == float(metrics["loss"]) not in losses
    for one, other in zip(jax.tree.leaves(resumed), jax.tree.leaves(went_on), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
