"""200 steps of the tiny GPT: accumulation and remat change the memory of the step and not its curve."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import gpt
from jaxmem import MemoryConfig, make_train_step

CONFIGS = {
    "K1": MemoryConfig(),
    "none": MemoryConfig(accumulation_steps=8),
    "full": MemoryConfig(accumulation_steps=8, remat="full"),
    "dots": MemoryConfig(accumulation_steps=8, remat="dots"),
}


@pytest.fixture(scope="module")
def runs():
    """Per config: the losses of 200 steps, and the temporary bytes of the compiled step."""
    # The tests' own flags ask for unoptimised machine code, which is quick to compile and slow to run.
    workload = dataclasses.replace(gpt.workload(), compiler_options={"xla_backend_optimization_level": 3})
    start = make_train_step(workload).init()
    out = {}
    for name, config in CONFIGS.items():
        step = make_train_step(workload, config).compile()
        state, losses = jax.tree.map(jnp.copy, start), []
        for window in range(200):
            state, metrics = step(state, workload.data(window))
            losses.append(metrics["loss"])
        out[name] = np.array(losses), step.memory_analysis().temp_size_in_bytes
    return out


def test_remat_policies_agree(runs):
    for name in ("full", "dots"):
        np.testing.assert_allclose(runs[name][0][:20], runs["none"][0][:20], rtol=0, atol=1e-5)


def test_accumulation_agrees_with_the_whole_batch(runs):
    whole, accumulated = runs["K1"][0], runs["none"][0]
    np.testing.assert_allclose(accumulated[:20], whole[:20], rtol=0, atol=1e-5)
    # Adam amplifies rounding, so later steps agree in the mean.
    assert abs(accumulated[-20:].mean() - whole[-20:].mean()) <= 0.05


@pytest.mark.parametrize("name", CONFIGS)
def test_learns(runs, name):
    losses = runs[name][0]
    assert losses[0] > 5.0  # about ln 256: it knows nothing yet
    assert losses[-20:].mean() < 2.5
    assert losses[-1] < 2.6


def test_temporaries_shrink_as_less_is_kept(runs):
    temps = {name: temp for name, (_, temp) in runs.items()}
    assert temps["full"] < temps["dots"] < temps["none"] < temps["K1"] / 4
