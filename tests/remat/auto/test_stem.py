"""What lies before and between blocks is chosen too."""

import os

import jax
import jax.numpy as jnp
import pytest

from jaxmem import remat
from jaxmem.errors import BudgetInfeasible
from jaxmem.remat.auto import Rates, build_problem
from jaxmem.remat.auto._assignment import plain, smallest
from jaxmem.remat.auto._within import assign

CHANNELS = 4


def loss(params, images):
    x = jnp.tanh(jnp.exp(-((images @ params["stem"]) ** 2)))
    x = x.reshape(len(x), -1, 8, CHANNELS).mean(2)
    for w in params["layers"]:
        x = x + jnp.sin(jnp.sin(x) @ w)
    return (x**2).mean()


def arguments():
    key = jax.random.key(0)
    params = {
        "stem": jax.random.normal(key, (3, CHANNELS)),
        "layers": [jax.random.normal(key, (CHANNELS, CHANNELS))] * 4,
    }
    return params, jax.random.normal(key, (2, 64, 3))


def test_the_first_layers_obey_the_budget():
    params, images = arguments()
    plain = remat.residual_bytes(loss, params, images)
    small = remat.auto(loss, 0.25)
    assert remat.residual_bytes(small, params, images) <= 0.25 * plain
    assert any(v.layer == "stem" and v.fate == "recompute" for v in small.solve(params, images).values)
    want, got = (jax.value_and_grad(fn)(params, images) for fn in (loss, small))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert jnp.allclose(a, b, rtol=1e-5, atol=1e-7)


def ends(params, images):
    x = images @ params["stem"]
    for w in params["layers"]:
        x = x + jnp.sin(jnp.sin(x) @ w)
    return jax.nn.logsumexp(jnp.sin(jnp.tanh(x[..., None] * jnp.ones(64))), axis=-1).sum()


def test_the_end_takes_no_share_of_what_blocks_keep():
    """A loss's large logits are gone when the blocks' backward passes start."""
    problem = build_problem(ends, arguments(), {}, Rates.of(None))
    everything = plain(problem)
    inside = everything.kept_bytes - everything.outside_bytes
    assert everything.outside_bytes > 10 * inside > 0
    # No working set beside it; a broadcast takes nothing.
    assert everything.total_bytes == pytest.approx(everything.kept_bytes, rel=1e-3)
    kept = {v.layer for v in remat.auto(ends, everything.total_bytes).solve(*arguments()).values if v.fate == "keep"}
    assert "head" in kept and {v for v in kept if v.startswith("loss[")}
    least = everything.total_bytes - inside + smallest(problem).kept_bytes  # what blocks keep is not kept twice
    tight = assign(problem, least)
    assert tight.total_bytes <= least and tight.price >= assign(problem, everything.total_bytes).price
    assert tight.choices["head"] == everything.choices["head"]  # as it is written


def test_the_end_is_made_again_where_a_share_asks_for_it():
    plain_bytes = remat.residual_bytes(ends, *arguments())
    small = remat.auto(ends, 0.3)
    assert remat.residual_bytes(small, *arguments()) <= 0.3 * plain_bytes
    assert any(v.layer == "head" and v.fate == "recompute" for v in small.solve(*arguments()).values)
    want, got = (jax.value_and_grad(fn)(*arguments()) for fn in (ends, small))
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(got), strict=True):
        assert jnp.abs(a - b).max() <= 1e-5 * jnp.abs(a).max()


def test_what_is_in_no_block_is_listed_and_named():
    def layer(x, w):
        return x + jnp.sin(jnp.sin(x[:, None] * w) @ w).sum(1), None

    def loss(params, x):
        x, _ = jax.lax.scan(layer, jnp.sin(x), params)
        return x.sum()

    params, x = jnp.ones((4, 64, 64)), jnp.ones(64)
    (outside,) = remat.auto(loss, 0.5).solve(params, x).outside
    assert (outside.op, outside.size_bytes) == ("cos", 64 * 4) and "test_stem.py:" in outside.source
    (shared,) = build_problem(loss, (params, x), {}, Rates.of(None), shards=4).outside
    assert shared.size_bytes == 64  # one device's, as those of blocks are
    for budget in (100, 0.001):
        with pytest.raises(BudgetInfeasible) as refused:
            remat.auto(loss, budget).solve(params, x)
        assert f"256 B cos (outside of blocks, {os.path.basename(outside.source)})" in refused.value.got
        assert "512 B input (scan × 2, " in refused.value.got  # in segments
