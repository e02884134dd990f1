"""Keys: micro-batch i of K has `fold_in(rng, i)`; K=1 has the key itself."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import Last, LossOutput, Sum, WeightedMean
from jaxmem.remat import checkpoint
from tests.accumulate.problems import accumulated, assert_trees_close

KEYS = {impl: jax.random.key(5, impl=impl) for impl in ("threefry2x32", "rbg")}


def dropout_loss(w, x, *, rng):
    """Halves the rows' features; the mask of micro-batch i lands in row i of a metric, so that they can be read."""
    keep = jax.random.bernoulli(rng, 0.5, x["ones"].shape)
    loss = jnp.where(keep, w * x["ones"], 0).sum()
    place = jnp.zeros((4, *keep.shape), jnp.int32).at[x["index"][0]].set(keep)
    return LossOutput(WeightedMean(loss, keep.size), {"masks": Sum(place)})


def dropout_batch(k):
    """Eight rows of 16 ones, and the number of the micro-batch that each row falls into."""
    return {"ones": jnp.ones((8, 16)), "index": jnp.arange(8) % k}


def masks(key, k):
    return accumulated(dropout_loss, k)(jnp.float32(1.0), dropout_batch(k), rng=key)


@pytest.mark.parametrize("impl", KEYS)
def test_every_micro_batch_has_its_own_reproducible_mask(impl):
    """Cases 8 and 10: distinct masks, the ones that a Python loop over fold_in(key, i) draws, rbg keys included.

    Cheap generators are not invariant under vmap, so accumulation must scan, never vmap, over micro-batches.
    """
    out = masks(KEYS[impl], 4)
    for i in range(4):
        want = jax.random.bernoulli(jax.random.fold_in(KEYS[impl], i), 0.5, (2, 16))
        assert (out.metrics["masks"][i] == want).all()
    assert len({mask.tobytes() for mask in np.asarray(out.metrics["masks"])}) == 4
    np.testing.assert_allclose(out.grads, out.metrics["masks"].mean(), rtol=1e-6)


def test_one_micro_batch_gets_the_key_as_it_is():
    """Case 8: K=1 equals the user's plain step."""
    got = masks(KEYS["threefry2x32"], 1).metrics["masks"][0]
    assert (got == jax.random.bernoulli(KEYS["threefry2x32"], 0.5, (8, 16))).all()


def test_raw_uint32_keys_work():
    got = masks(jax.random.PRNGKey(5), 4).metrics["masks"][3]
    assert (got == jax.random.bernoulli(jax.random.fold_in(KEYS["threefry2x32"], 3), 0.5, (2, 16))).all()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_recomputation_draws_the_same_mask(impl):
    """Case 9: dropout inside a remat block inside the scan over micro-batches changes no gradient."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32))

    def loss(block):
        def layer(w, x, key):
            return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x @ w), 0)

        def loss(w, x, *, rng):
            layer_ = block(layer)
            for key in jax.random.split(rng, 2):
                x = layer_(w, x, key)
            return WeightedMean((x**2).sum(), x.shape[0])

        return loss

    w = jnp.eye(8) + 0.1
    plain = accumulated(loss(lambda layer: layer), 2)(w, x, rng=KEYS[impl])
    remat = accumulated(loss(lambda layer: checkpoint(layer, "full")), 2)(w, x, rng=KEYS[impl])
    assert float(plain.value) > 0.1
    assert_trees_close(remat.grads, plain.grads, rtol=0, atol=1e-6)


def test_without_a_key_the_loss_sees_none():
    def loss(w, x, *, rng):
        assert rng is None
        return (w * x).mean()

    assert float(accumulated(loss, 2)(jnp.float32(1.0), jnp.ones(4)).value) == 1.0


def test_the_key_reaches_weights_too():
    """A weight that is drawn: the pre-pass and the gradient must draw the same."""

    def loss(w, x, *, rng):
        mask = jax.random.bernoulli(rng, 0.5, x.shape)
        return LossOutput(WeightedMean((w * x * mask).sum(), mask.sum()), {"last": Last(mask)})

    x, key = jnp.arange(1.0, 9.0), KEYS["threefry2x32"]
    keeps = [jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, (4,)) for i in range(2)]
    total = sum((x[i::2] * keep).sum() for i, keep in enumerate(keeps))
    out = accumulated(loss, 2)(jnp.float32(1.0), x, rng=key)
    np.testing.assert_allclose(out.grads, total / sum(keep.sum() for keep in keeps), rtol=1e-6)
    assert (out.metrics["last"] == keeps[1]).all()
