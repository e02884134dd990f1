"""`assert_equivalent` passes what equals the plain step, and says by leaf what does not."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import LossOutput, MemoryConfig, WeightedMean, Workload, assert_equivalent
from jaxmem.errors import ConfigError, NotEquivalentError
from jaxmem.train._leaves import leaf_differences

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
BATCH = {"x": X, "mask": np.array([1, 1, 0, 0, 1, 0, 1, 0], np.float32)}
PARAMS = {"w": np.ones((3, 2), np.float32), "b": np.zeros(2, np.float32)}


def rows(params, batch):
    return jnp.sum((jnp.tanh(batch["x"] @ params["w"]) + params["b"] - 1) ** 2, 1) * batch["mask"]


def weighted(params, batch):
    return WeightedMean(rows(params, batch).sum(), batch["mask"].sum())


def mean_of_means(params, batch):
    return rows(params, batch).sum() / batch["mask"].sum()


def workload(loss, **options):
    return Workload(loss, PARAMS, BATCH, optax.adam(1e-3), **options)


def test_an_exact_config_passes_and_returns_every_leaf():
    found = assert_equivalent(workload(weighted), MemoryConfig(accumulation_steps=4))
    assert {leaf.path for leaf in found} == {"w", "b"}
    assert found[0].relative_error == max(leaf.relative_error for leaf in found) < 1e-5


def test_a_mean_of_means_is_told_by_leaf():
    with pytest.raises(NotEquivalentError) as error:
        assert_equivalent(workload(mean_of_means), MemoryConfig(accumulation_steps=4))
    text = str(error.value)
    assert isinstance(error.value, AssertionError)
    assert "2 of 2 leaves of the gradients" in text and "w float32[3, 2]" in text and "WeightedMean" in text
    assert "1 of 1 leaves of the loss" in text


def test_a_tolerance_of_ones_own():
    config = MemoryConfig(accumulation_steps=2, precision="bfloat16")
    worst = assert_equivalent(workload(weighted), config)[0].relative_error
    assert worst > 1e-4  # bfloat16 rounds
    with pytest.raises(NotEquivalentError, match="to 1e-06"):
        assert_equivalent(workload(weighted), config, tolerance=1e-6)


def test_model_state_is_compared():
    """A state that counts calls is the reference's; one read from a hidden counter is not."""
    calls = []

    def loss(params, batch, state):
        calls.append(None)
        return LossOutput(weighted(params, batch), state={"n": state["n"] + 1})

    state = {"n": np.zeros((), np.int32)}
    assert_equivalent(workload(loss, state=state), MemoryConfig(accumulation_steps=4))

    def moody(params, batch, state):
        calls.append(None)
        return LossOutput(weighted(params, batch), state={"n": state["n"] + len(calls)})

    with pytest.raises(NotEquivalentError, match="leaves of the state"):
        assert_equivalent(workload(moody, state=state), MemoryConfig(accumulation_steps=4))


def test_remat_without_effect_is_refused():
    with pytest.raises(ConfigError, match="beside its plain reference"):
        assert_equivalent(workload(weighted), MemoryConfig(remat="full"))


def test_complex_leaves_and_the_element_that_is_furthest_off():
    expected = {"z": np.array([1 + 1j, 2.0]), "n": np.array([1, 2])}
    got = {"z": np.array([1 + 1j, 2.5]), "n": np.array([1, 2])}
    worst, equal = leaf_differences(got, expected)
    assert (worst.path, worst.index, worst.got, worst.expected) == ("z", (1,), 2.5 + 0j, 2 + 0j)
    assert equal.relative_error == 0
