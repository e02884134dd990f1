"""The comparison with PyTorch's budget, at figures that PyTorch 2.13.0 gave for one block."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks._gpt_block import Shape, layer_norm
from benchmarks.torch_budget import counts, ours, posed

SAVED = {  # by activation_memory_budget: bytes saved, FLOPs recomputed
    0.1: (1_048_576, 1_207_959_552),
    0.3: (5_242_880, 671_088_640),
    0.5: (9_437_184, 134_217_728),
    0.7: (13_746_176, 0),
}


@pytest.fixture(scope="module")
def rows():
    program, problem = posed(Shape(layers=1))
    torch = {"layers": 1, "activation_memory_budget": 0.0}
    return [
        torch | {"torch_bytes": size, "torch_recompute_flops": flops} | ours(program, problem, size)
        for size, flops in SAVED.values()
    ]


def test_neither_bytes_nor_flops_are_above_pytorchs(rows):
    figures = counts(rows)
    assert figures["ours_over_budget"] == figures["ours_more_recompute"] == figures["monotone_violations"] == 0


def test_the_trace_agrees_with_the_model(rows):
    for row in rows:
        assert row["traced_bytes"] == row["ours_bytes"]
        assert row["traced_recompute_flops"] == row["ours_recompute_flops"]


def test_what_is_worse_is_counted(rows):
    first, second, *_ = rows
    worse = [first, second | {"traced_bytes": second["torch_bytes"] + 1, "ours_recompute_flops": 2e9}]
    figures = counts(worse)
    assert figures["ours_over_budget"] == figures["ours_more_recompute"] == figures["monotone_violations"] == 1


def test_a_budget_without_a_choice_counts_as_passed():
    program, problem = posed(Shape(layers=2, batch=1, time=16, width=32))
    row = {"layers": 2, "torch_bytes": 0, "torch_recompute_flops": 0} | ours(program, problem, 0)
    assert counts([row])["ours_over_budget"] == 1  # the second block's input must be kept


def test_the_blocks_normalisation_has_the_scale_and_the_bias():
    x = np.random.default_rng(0).standard_normal((2, 3, 8), np.float32)
    made = layer_norm(jnp.asarray(x), 2.0, 1.0)
    np.testing.assert_allclose(made.mean(-1), 1, atol=1e-5)
    np.testing.assert_allclose(made.std(-1), 2, rtol=1e-3)
