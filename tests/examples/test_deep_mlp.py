"""The 100-layer residual network: it learns, and what it keeps does not change what it computes."""

import jax
import numpy as np
import pytest

from examples import deep_mlp
from jaxmem import make_train_step


def losses(every: int, steps: int) -> np.ndarray:
    workload = deep_mlp.workload(every=every)
    step = make_train_step(workload)
    state, values = step.init(), []
    for window in range(steps):
        state, metrics = step(state, workload.data(window))
        values.append(float(metrics["loss"]))
    return np.array(values)


@pytest.fixture(scope="module")
def every_tenth():
    return losses(10, 60)


def test_learns(every_tenth):
    assert every_tenth[0] == pytest.approx(np.log(10), abs=0.01)  # it knows nothing yet
    assert every_tenth[-10:].mean() < 0.7


@pytest.mark.parametrize("every", [0, 7])
def test_what_is_kept_does_not_change_the_curve(every_tenth, every):
    np.testing.assert_allclose(losses(every, 10), every_tenth[:10], rtol=0, atol=1e-4)


def test_fewer_activations_are_kept():
    temps = [
        make_train_step(deep_mlp.workload(every=every)).compile().memory_analysis().temp_size_in_bytes
        for every in (0, 1, 10)
    ]
    assert temps[0] > 2 * temps[1] > 2 * temps[2]


def test_the_wide_preset_allocates_nothing():
    workload = deep_mlp.wide()
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(workload.batch))
    params = jax.eval_shape(workload.params, workload.rng)
    batch, width = workload.batch["image"].shape[0], params["in"].shape[1]
    layer_size = sum(leaf.size for leaf in jax.tree.leaves(params["layers"])) / 100
    assert batch * width > 10 * layer_size  # activations dominate
