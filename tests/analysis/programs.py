"""A small checkpointed model whose FLOPs are known by arithmetic."""

import jax
import jax.numpy as jnp
from jax import lax

ROWS, WIDTH, LAYERS = 128, 32, 4
# One matrix product of the model.
ONE = 2 * ROWS * WIDTH * WIDTH
# Two a layer forward, twice that backward.
FORWARD, BACKWARD = 2 * LAYERS * ONE, 4 * LAYERS * ONE

WEIGHTS = jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.float32)
INPUTS = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)


def layer(x, w):
    return jnp.sin(jnp.tanh(x @ w) @ w)


def scanned(*, remat: bool, prevent_cse: bool = True):
    block = jax.checkpoint(layer, prevent_cse=prevent_cse) if remat else layer

    def loss(weights, x):
        return jnp.sum(lax.scan(lambda x, w: (block(x, w), None), x, weights)[0] ** 2)

    return loss


def nested(*, remat: bool, remat_segments: bool):
    block = jax.checkpoint(layer) if remat else layer

    def segment(x, weights):
        return lax.scan(lambda x, w: (block(x, w), None), x, weights)[0]

    outer = jax.checkpoint(segment) if remat_segments else segment

    def loss(weights, x):
        weights = weights.reshape(2, -1, *weights.shape[1:])
        return jnp.sum(lax.scan(lambda x, w: (outer(x, w), None), x, weights)[0] ** 2)

    return loss


def unrolled(*, remat: bool, prevent_cse: bool = True):
    block = jax.checkpoint(layer, prevent_cse=prevent_cse) if remat else layer

    def loss(weights, x):
        for i in range(LAYERS):
            x = block(x, weights[i])
        return jnp.sum(x**2)

    return loss


def compiled_text(fn, *shapes) -> str:
    return jax.jit(fn).lower(*shapes).compile().as_text()
