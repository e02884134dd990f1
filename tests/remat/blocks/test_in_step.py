"""A train step of a loss that knows nothing of jaxmem is the step of one whose blocks were marked by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import MemoryConfig, Workload, compare, make_train_step
from jaxmem.errors import RematWithoutEffect
from tests.remat.blocks.models import D, layer, weights
from tests.unmarked import EXAMPLES, unmarked


@functools.cache
def workload(example):
    return EXAMPLES[example].workload(batch=8)


@functools.cache
def residual_bytes(example, remat, marked):
    work = workload(example) if marked else unmarked(workload(example))
    return make_train_step(work, MemoryConfig(remat=remat)).residual_bytes()


@pytest.mark.parametrize("remat", ["full", "dots", "dots_no_batch"])
@pytest.mark.parametrize("example", EXAMPLES)
def test_residuals_agree_with_and_without_the_handle(example, remat):
    by_hand, found = (residual_bytes(example, remat, marked) for marked in (True, False))
    assert abs(found - by_hand) <= 0.03 * by_hand
    assert found < residual_bytes(example, "none", False)


@pytest.mark.parametrize("example", EXAMPLES)
def test_policies_are_in_order(example):
    none, dots, no_batch, full = (
        residual_bytes(example, remat, False) for remat in ("none", "dots", "dots_no_batch", "full")
    )
    assert none > dots >= no_batch >= full


def stack(scanned):
    def loss(params, batch):
        if scanned:
            out, _ = jax.lax.scan(lambda x, w: (layer(x, w), None), batch, params)
        else:
            out = batch
            for w in params:
                out = layer(out, w)
        return (out**2).mean()

    params = weights(6, D, D)
    return Workload(loss, params if scanned else list(params), weights(32, D), optax.sgd(0.1))


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("accumulation_steps", [1, 2])
def test_a_step_under_remat_computes_the_same(scanned, accumulation_steps):
    work = stack(scanned)
    results = []
    for remat in ("none", "full"):
        step = make_train_step(work, MemoryConfig(remat=remat, accumulation_steps=accumulation_steps))
        results.append(step(step.init(), work.batch))
    (state_a, metrics_a), (state_b, metrics_b) = results
    np.testing.assert_allclose(metrics_a["loss"], metrics_b["loss"], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(state_a.params), jax.tree.leaves(state_b.params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_compare_without_the_handle():
    rows = compare({name: MemoryConfig(remat=name) for name in ("none", "full")}, stack(True), target="cpu")
    none, full = rows["none"], rows["full"]
    assert full.saved_residual_bytes < none.saved_residual_bytes / 3
    assert full.temp_bytes < none.temp_bytes
    assert full.recompute_flops > 0 == none.recompute_flops


def test_bfloat16_keeps_the_masters_and_not_their_casts():
    config = MemoryConfig(remat="full", precision="bfloat16")
    step = make_train_step(stack(False), config)
    assert step.residual_bytes() <= 7 * 32 * D * 2  # the input of each block and of the loss
    assert step.lower() is not None


def test_nothing_repeats():
    work = Workload(lambda w, x: jnp.mean(jnp.tanh(x @ w)), weights(D, D), weights(4, D), optax.sgd(0.1))
    step = make_train_step(work, MemoryConfig(remat="full"))
    with pytest.raises(RematWithoutEffect, match="Block_0.*memory.block"):
        step.lower()
    with pytest.raises(RematWithoutEffect, match="layers that repeat"):
        compare({"full": MemoryConfig(remat="full")}, work, target="cpu")
