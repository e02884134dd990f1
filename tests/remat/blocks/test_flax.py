"""Blocks of Flax modules: by name in Linen, by structure in NNX."""

import functools

import jax
import numpy as np
import pytest
from flax import nnx

from jaxmem.remat import checkpoint, residual_bytes
from jaxmem.remat.blocks import at_blocks
from tests.remat.blocks import models
from tests.remat.blocks.models import TOKENS, X, assert_same, blocks_of, full, names_of, weights


def linen_loss(module, x):
    params = jax.eval_shape(module.init, jax.random.key(0), x)

    def loss(params, x):
        return (module.apply(params, x) ** 2).sum()

    return loss, params


LINEN = {
    "encoder": (models.Encoder(3), ["Encoder/Block_0", "Encoder/Block_1", "Encoder/Block_2"]),
    "towers": (
        models.Towers(),
        [f"Towers/{t}/Block_{i}" for t, i in [("image", 0), ("image", 1), ("image", 2), ("text", 0), ("text", 1)]],
    ),
    "encoder-decoder": (
        models.EncoderDecoder(),
        [f"EncoderDecoder/encoder/Block_{i}" for i in range(3)]
        + [f"EncoderDecoder/decoder_layer{i}" for i in range(2)],
    ),
    "stages": (models.Stages(), [f"Stages/Encoder_{i}/Block_{j}" for i in range(3) for j in range(2)]),
    "shared": (models.Shared(), [f"Shared/block[{i}/4]" for i in range(1, 5)]),
    "siamese": (models.Siamese(), [f"Siamese/encoder/Block_{i}{n}" for n in ("", "#2") for i in range(2)]),
}


@pytest.mark.parametrize("name", LINEN)
def test_linen_blocks_by_name(name):
    module, names = LINEN[name]
    loss, params = linen_loss(module, TOKENS)
    blocks = blocks_of(loss, params, TOKENS)
    assert [block.name for block in blocks] == names
    assert {block.kind for block in blocks} == {"structure" if name == "shared" else "module"}
    cut = at_blocks(loss, full)
    assert residual_bytes(cut, params, TOKENS, argnums=0) < residual_bytes(loss, params, TOKENS, argnums=0) / 3


def test_linen_gradients():
    module = models.EncoderDecoder()
    loss, _ = linen_loss(module, TOKENS)
    assert_same(loss, jax.jit(module.init)(jax.random.key(0), TOKENS), TOKENS, rtol=1e-5)


def test_linen_under_vmap():
    module = models.Encoder(2)
    params = jax.eval_shape(module.init, jax.random.key(0), TOKENS[0])
    loss = lambda params, x: jax.vmap(lambda row: (module.apply(params, row) ** 2).sum())(x).sum()  # noqa: E731
    assert names_of(loss, params, TOKENS) == ["Encoder/Block_0", "Encoder/Block_1"]


def test_batch_norm_and_dropout_without_modules_round_a_layer():
    module, x = models.Convolutions(), weights(2, 6, 6, 4)
    variables = jax.jit(module.init)({"params": jax.random.key(0), "dropout": jax.random.key(1)}, x)
    stats = variables["batch_stats"]

    def loss(params, stats, x, key):
        out, new = module.apply(
            {"params": params, "batch_stats": stats}, x, mutable=["batch_stats"], rngs={"dropout": key}
        )
        return (out**2).sum(), new

    args = variables["params"], stats, x, jax.random.key(2)
    assert [block.kind for block in blocks_of(loss, *args)] == ["structure"] * 3
    (a, new_a), grads_a = jax.jit(jax.value_and_grad(loss, has_aux=True))(*args)
    (b, new_b), grads_b = jax.jit(jax.value_and_grad(at_blocks(loss, full), has_aux=True))(*args)
    for left, right in zip(jax.tree.leaves((a, new_a, grads_a)), jax.tree.leaves((b, new_b, grads_b)), strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)


def test_nnx_blocks_by_structure():
    model = models.NnxModel(3, nnx.Rngs(0))
    graph, params, state = nnx.split(model, nnx.Param, ...)

    def loss(params, state, x, block=lambda b: b):
        model = nnx.merge(graph, params, state, copy=True)
        x = model.dropout(model.embed(x))
        for b in model.blocks:
            x = block(b)(x)
        return (model.norm(x) ** 2).sum(), nnx.split(model, nnx.Param, ...)[2]

    marked = functools.partial(loss, block=lambda b: checkpoint(b, "full"))
    blocks = blocks_of(loss, params, state, X)
    assert [block.kind for block in blocks] == ["structure"] * 3
    kept = [
        residual_bytes(lambda p, s, x, f=f: f(p, s, x)[0], params, state, X, argnums=0)
        for f in (marked, at_blocks(loss, full))
    ]
    assert kept[0] == kept[1]
    (a, state_a), grads_a = jax.jit(jax.value_and_grad(loss, has_aux=True))(params, state, X)
    (b, state_b), grads_b = jax.jit(jax.value_and_grad(at_blocks(loss, full), has_aux=True))(params, state, X)
    assert a == b
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), grads_a, grads_b)
    same = jax.tree.map(lambda x, y: bool((x == y).all()), state_a, state_b)
    assert all(jax.tree.leaves(same)) and jax.tree.leaves(state_a)
