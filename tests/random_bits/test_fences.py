"""Which masks get a fence, where, and that no number changes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import Mesh, PartitionSpec

from jaxmem.jaxprs import equations_in
from jaxmem.random_bits import LEAST, drawn, fenced

KEY, X = jax.random.key(1), jnp.linspace(-1.0, 1.0, 64).reshape(8, 8)


def fences(fn, *args, **options) -> int:
    """The fences in the program of a function, at every depth."""
    program = jax.make_jaxpr(fenced(fn, **{"least": 8, **options}))(*args)
    return sum(eqn.primitive.name == "optimization_barrier" for eqn in equations_in(program.jaxpr))


def kept(mask):
    return jnp.where(mask, X, 0)


def by_scan(key, x):
    keys = jax.random.split(key, 3)
    return jax.lax.scan(lambda x, key: (x * jax.random.bernoulli(key, 0.9, x.shape), None), x, keys)[0]


def by_shard_map(key, x):
    mesh = Mesh(np.array(jax.devices()[:1]), ("data",))
    spec = PartitionSpec("data")
    drop = lambda x: x * jax.random.bernoulli(key, 0.9, x.shape)  # noqa: E731
    return jax.shard_map(drop, mesh=mesh, in_specs=spec, out_specs=spec)(x)


def from_words(key, x):
    """A mask by a generator of the user's own."""
    first, second = jax.random.key_data(key)
    return kept(((jax.lax.iota(jnp.uint32, 64).reshape(8, 8) * 747796405 + first) ^ second) < jnp.uint32(2**31))


MASKS = {
    "bernoulli": lambda key, x: kept(jax.random.bernoulli(key, 0.9, x.shape)),
    "uniform": lambda key, x: kept(jax.random.uniform(key, x.shape) < 0.9),
    "a traced rate for each column": lambda key, x: kept(jax.random.uniform(key, x.shape) < jnp.abs(x[0])),
    "rademacher": lambda key, x: x * jax.random.rademacher(key, x.shape),
    "randint": lambda key, x: kept(jax.random.randint(key, x.shape, 0, 10) > 0),
    "integers as bools": lambda key, x: kept(jax.random.randint(key, x.shape, 0, 2).astype(bool)),
    "bytes": lambda key, x: kept(jax.random.bits(key, x.shape, jnp.uint8) >= 25),
    "a normal": lambda key, x: kept(jax.random.normal(key, x.shape) < 1.0),
    "key words": from_words,
    "vmap over keys": lambda key, x: jax.vmap(lambda k, r: r * jax.random.bernoulli(k, 0.9, r.shape))(
        jax.random.split(key, 8), x
    ),
    "scan": by_scan,
    "scan of what is drawn before": lambda key, x: jax.lax.scan(
        lambda c, u: (c + (u < 0.9), None), x[0], jax.random.uniform(key, x.shape)
    )[0],
    "checkpoint": lambda key, x: jax.checkpoint(lambda x: kept(jax.random.bernoulli(key, 0.9, x.shape)) * x)(x),
    "cond": lambda key, x: jax.lax.cond(
        x.sum() > 0, lambda: kept(jax.random.bernoulli(key, 0.9, x.shape)), lambda: kept(x > 0)
    ),
    "shard_map": by_shard_map,
    "linen": lambda key, x: nn.Dropout(0.1, deterministic=False).apply({}, x, rngs={"dropout": key}),
    "nnx": lambda key, x: nnx.Dropout(0.1, rngs=nnx.Rngs(dropout=key))(x),
    "attention": lambda key, x: nn.dot_product_attention(
        x[:, None],
        x[:, None],
        x[:, None],
        dropout_rng=key,
        dropout_rate=0.1,
        deterministic=False,
        broadcast_dropout=False,
    ),
}


@pytest.mark.parametrize("name", MASKS)
def test_every_mask_is_fenced_once(name):
    assert fences(MASKS[name], KEY, X) == 1
    assert fences(fenced(MASKS[name], least=8), KEY, X) == 1  # one that is there is enough


def test_no_number_changes():
    def every(x, around):
        return jnp.stack([jnp.sum(around(fn)(KEY, x) ** 2) for fn in MASKS.values()])

    free, apart = (
        jax.jit(jax.value_and_grad(lambda x, a=around: every(x, a).sum()))(X)
        for around in (lambda fn: fn, lambda fn: fenced(fn, least=8))
    )
    jax.tree.map(np.testing.assert_array_equal, free, apart)


@pytest.mark.parametrize(
    "fn",
    [
        lambda key, x: x + jax.random.normal(key, x.shape),
        lambda key, x: kept(x > 0),
        lambda key, x: kept(x + jax.random.normal(key, x.shape) > 0),  # of data, too
        lambda key, x: x * jax.random.bernoulli(key, 0.9, (7,))[0],
        lambda key, x: jax.random.categorical(key, x),
        lambda key, x: jax.random.permutation(key, x),
        lambda key, x: jax.random.gamma(key, 1.0, x.shape),  # it rejects in a loop of its own
    ],
)
def test_what_is_no_mask_of_random_bits_has_no_fence(fn):
    assert fences(fn, KEY, X) == 0


def test_masks_are_counted_and_small_ones_left():
    wide = jnp.ones((LEAST // 64, 64))
    found, narrow = (drawn(jax.make_jaxpr(by_scan)(KEY, x)) for x in (wide, wide[1:]))
    assert found.masks == 3 and found.mask_bytes == 3 * LEAST
    assert narrow.masks == 0 and narrow.draws
    assert fences(by_scan, KEY, wide[1:], least=LEAST) == 0
    assert not drawn(jax.make_jaxpr(lambda x: kept(x > 0))(X)).draws


def test_a_fenced_function_is_vmapped_and_returns_what_it_returned():
    def fn(key, x):
        return {"mask": jax.random.bernoulli(key, 0.5, x.shape), "name": "m"}

    assert fenced(fn, least=8)(KEY, X)["name"] == "m"
    keys = jax.random.split(KEY, 4)
    got = jax.vmap(fenced(lambda key: fn(key, X)["mask"], least=8))(keys)
    np.testing.assert_array_equal(got, jax.vmap(lambda key: fn(key, X)["mask"])(keys))
