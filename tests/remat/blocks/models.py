"""Small models that know nothing of jaxmem, for the block cutter, and what is asked of each."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

from jaxmem.remat import checkpoint, residual_bytes
from jaxmem.remat.blocks import at_blocks, find_blocks

D = 8


def weights(*shape):
    return jax.random.normal(jax.random.key(sum(shape)), shape) / shape[-1] ** 0.5


X = weights(4, D)
TOKENS = weights(2, 4, D)


def layer(x, w):
    return x + jnp.tanh(jax.nn.gelu(x @ w) @ w.T)


def loop(ws, x):
    for w in ws:
        x = layer(x, w)
    return x


def scan(ws, x):
    return jax.lax.scan(lambda carry, w: (layer(carry, w), None), x, ws)[0]


class Block(nn.Module):
    """Two projections of one shape (which repeat inside the block), attention and an MLP."""

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        query, key = nn.Dense(D)(h), nn.Dense(D)(h)
        x = x + jax.nn.softmax(query @ key.swapaxes(-1, -2)) @ h
        return x + nn.Dense(D)(nn.gelu(nn.Dense(4 * D)(nn.LayerNorm()(x))))


class Encoder(nn.Module):
    layers: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.layers):
            x = Block()(x)
        return nn.LayerNorm()(x)


class DecoderBlock(nn.Module):
    """Attention twice: repeated modules inside of a repeated module."""

    @nn.compact
    def __call__(self, y, memory):
        for source in (y, memory):
            y = y + nn.MultiHeadAttention(2)(nn.LayerNorm()(y), source)
        return y + nn.Dense(D)(nn.gelu(nn.Dense(4 * D)(nn.LayerNorm()(y))))


class EncoderDecoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        memory = Encoder(3, name="encoder")(x)
        for i in range(2):
            x = DecoderBlock(name=f"decoder_layer{i}")(x, memory)
        return x


class Towers(nn.Module):
    @nn.compact
    def __call__(self, x):
        return Encoder(3, name="image")(x) * Encoder(2, name="text")(x * 2)


class Stages(nn.Module):
    """Repeated modules that consist of repeated modules."""

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.Dense(D)(Encoder(2)(x))
        return x


class Shared(nn.Module):
    """One block's weights for every layer."""

    @nn.compact
    def __call__(self, x):
        block = Block(name="block")
        for _ in range(4):
            x = block(x)
        return x


class Siamese(nn.Module):
    @nn.compact
    def __call__(self, x):
        encoder = Encoder(2, name="encoder")
        return encoder(x) * encoder(x * 2)


class Convolutions(nn.Module):
    """BatchNorm and dropout, no module round a layer."""

    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(4, (3, 3))(x)))
            x = nn.Dropout(0.25, deterministic=False)(x)
        return x


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(D, rngs=rngs)
        self.wide, self.narrow = nnx.Linear(D, 4 * D, rngs=rngs), nnx.Linear(4 * D, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.narrow(nnx.gelu(self.wide(self.norm(x)))))


class NnxModel(nnx.Module):
    def __init__(self, layers, rngs):
        self.embed = nnx.Linear(D, D, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(D, rngs=rngs)

    def __call__(self, x):
        x = self.dropout(self.embed(x))
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


# -- what is asked of them ------------------------------------------------------------------------------


def full(fn, *, scanned, name):
    return checkpoint(fn, "full", scanned=scanned)


def blocks_of(fn, *args):
    return find_blocks(jax.make_jaxpr(fn)(*args))


def names_of(fn, *args):
    return [block.name for block in blocks_of(fn, *args)]


def by_hand(block_loss):
    """`block_loss(block)` with each block marked by a person."""
    return block_loss(jax.checkpoint), block_loss(lambda fn: fn)


def assert_same(fn, *args, rtol=2e-6):
    """Values and gradients of the plain function, for fewer bytes."""
    cut = at_blocks(fn, full)
    expected = jax.jit(jax.value_and_grad(fn))(*args)
    got = jax.jit(jax.value_and_grad(cut))(*args)
    norm = np.sqrt(sum(np.linalg.norm(np.float64(leaf)) ** 2 for leaf in jax.tree.leaves(expected)))
    for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(got), strict=True):
        assert a.dtype == b.dtype and np.linalg.norm(np.float64(a - b)) <= rtol * norm
    assert residual_bytes(cut, *args, argnums=0) < residual_bytes(fn, *args, argnums=0)
