"""The tiny GPT trains for 200 steps; accumulation and remat change the memory of its step and not its curve."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples import gpt
from jaxmem import MemoryConfig, make_train_step

STEPS = {"K1": 20, "none": 200, "full": 20, "dots": 20}  # a wrong gradient shows in the first ones
CONFIGS = {
    "K1": MemoryConfig(),
    "none": MemoryConfig(accumulation_steps=8),
    "full": MemoryConfig(accumulation_steps=8, remat="full"),
    "dots": MemoryConfig(accumulation_steps=8, remat="dots"),
}


@pytest.fixture(scope="module")
def runs():
    """Per config: the losses of its steps, and the temporary bytes of the compiled step."""
    # The tests' own flags ask for unoptimised machine code, which is quick to compile and slow to run.
    workload = dataclasses.replace(gpt.workload(), compiler_options={"xla_backend_optimization_level": 3})
    start = make_train_step(workload).init()
    out = {}
    for name, config in CONFIGS.items():
        step = make_train_step(workload, config).compile()
        state, losses = jax.tree.map(jnp.copy, start), []
        for window in range(STEPS[name]):
            state, metrics = step(state, workload.data(window))
            losses.append(metrics["loss"])
        out[name] = np.array(losses), step.memory_analysis().temp_size_in_bytes
    return out


@pytest.mark.parametrize("name, other", [("full", "none"), ("dots", "none"), ("none", "K1")])
def test_the_curves_agree(runs, name, other):
    np.testing.assert_allclose(runs[name][0][:20], runs[other][0][:20], rtol=0, atol=1e-5)


def test_learns(runs):
    losses = runs["none"][0]
    assert losses[0] > 5.0  # about ln 256: it knows nothing yet
    assert losses[-20:].mean() < 2.5
    assert losses[-1] < 2.6


def test_temporaries_shrink_as_less_is_kept(runs):
    temps = {name: temp for name, (_, temp) in runs.items()}
    assert temps["full"] < temps["dots"] < temps["none"] < temps["K1"] / 4
