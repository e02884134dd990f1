"""The block cutter finds what a person would mark, and changes nothing but what is kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxmem.remat import residual_bytes
from jaxmem.remat.blocks import apply_at_blocks, at_blocks, find_blocks
from tests.remat.blocks.models import D, X, assert_same, blocks_of, by_hand, full, layer, loop, scan, weights


def marked_loop(block):
    def loss(ws, x):
        for w in ws:
            x = block(layer)(x, w)
        return (x**2).sum()

    return loss


def marked_scan(block):
    return lambda ws, x: (jax.lax.scan(block(lambda x, w: (layer(x, w), None)), x, ws)[0] ** 2).sum()


def marked_scans_in_scan(block):
    def body(x, ws):
        return scan(ws, x), None

    return lambda ws, x: (jax.lax.scan(block(body), x, ws)[0] ** 2).sum()


def marked_towers(block):
    """Two towers whose layers alternate, of different widths."""

    def loss(pairs, x):
        a, b = x, 2 * x
        for v, w in pairs:
            a, b = block(layer)(a, v), block(layer)(b, w)
        return (a * b).sum()

    return loss


def marked_encoder_decoder(block):
    def decode(y, memory, v, w):
        y = layer(y, v)
        return y + jax.nn.softmax((y @ w) @ memory.T) @ memory

    def loss(params, x):
        memory = x
        for w in params[0]:
            memory = block(layer)(memory, w)
        for v, w in params[1]:
            x = block(decode)(x, memory, v, w)
        return (x**2).sum()

    return loss


def marked_slices(block):
    """Weights in one stack, cast and sliced layer by layer."""

    def loss(stack, x):
        for i in range(len(stack)):
            x = block(lambda x, stack, i=i: layer(x, stack[i].astype(jnp.bfloat16)))(x, stack)
        return x.astype(jnp.float32).sum()

    return loss


def affine(x, w):
    """An operator of one example under `vmap`, named alike in every layer, as Equinox's are."""
    with jax.named_scope("lib.Affine"):
        return (x[:, None] @ w)[:, 0] + w[0]


def gated(x, w):
    """A layer that is more than the operator."""
    a = affine(x, w)
    return x + jnp.tanh(a) * jnp.sin(a) * jnp.exp(-(a**2))


def spectral(x, w):
    """A layer whose larger half has no name: a product of frequencies beside the operator."""
    frequencies = jnp.fft.rfft(x, axis=-1) @ w[: D // 2 + 1, : D // 2 + 1].astype(jnp.complex64)
    return jax.nn.gelu(jnp.fft.irfft(frequencies, n=D, axis=-1) + affine(x, w))


def between_named_operators(layer):
    """Marked layers between a stem and a head of the operator that is in each of them."""

    def marked(block):
        def loss(params, x):
            stem, ws, head = params
            x = affine(x, stem)
            for w in ws:
                x = block(layer)(x, w)
            return jnp.sum(affine(x, head))

        return loss

    return marked


NAMED = weights(D, D), [weights(D, D)] * 3, weights(D, 1)

SAME_AS_BY_HAND = {
    "loop": (marked_loop, [weights(D, D)] * 4, 4),
    "shared weights": (lambda block: lambda w, x: marked_loop(block)([w] * 4, x), weights(D, D), 4),
    "scan": (marked_scan, weights(4, D, D), 1),
    "nested scans": (marked_scans_in_scan, weights(2, 3, D, D), 1),
    "towers": (marked_towers, [(weights(D, D), weights(D, 12))] * 3, 6),
    "encoder-decoder": (marked_encoder_decoder, ([weights(D, D)] * 3, [(weights(D, D), weights(D, D))] * 2), 5),
    "slices of a stack": (marked_slices, weights(4, D, D), 4),
    "in jit": (lambda block: jax.jit(marked_loop(block)), [weights(D, D)] * 3, 3),
    "named operators": (between_named_operators(gated), NAMED, 3),
    "named beside unnamed": (between_named_operators(spectral), NAMED, 3),
    "jitted layers": (lambda block: marked_loop(lambda fn: block(jax.jit(fn))), [weights(D, D)] * 3, 3),
}


@pytest.mark.parametrize("name", SAME_AS_BY_HAND)
def test_blocks_are_those_marked_by_hand(name):
    make, params, count = SAME_AS_BY_HAND[name]
    x = X.astype(jnp.bfloat16) if name == "slices of a stack" else X
    marked, plain = by_hand(make)
    assert len(blocks_of(plain, params, x)) == count
    assert residual_bytes(at_blocks(plain, full), params, x, argnums=0) == residual_bytes(marked, params, x, argnums=0)
    assert_same(plain, params, x, rtol=2e-2 if x.dtype == jnp.bfloat16 else 2e-6)


# -- any program --------------------------------------------------------------------------------------

STEPS = {
    "dot": lambda x, w: x @ w,
    "tanh": lambda x, w: jnp.tanh(x),
    "relu": lambda x, w: jax.nn.relu(x),
    "add": lambda x, w: x + w[0],
    "gate": lambda x, w: x * jax.nn.sigmoid(x @ w),
    "scan": lambda x, w: jax.lax.scan(lambda c, _: (jnp.sin(c @ w), None), x, None, length=2)[0],
    "norm": lambda x, w: x / (1 + jnp.abs(x).max(-1, keepdims=True)),
}
steps = st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4)


@settings(max_examples=10)
@given(head=steps, unit=steps, repeats=st.integers(1, 4), skip=st.booleans(), tail=steps)
def test_any_repeated_program_keeps_its_value_and_gradient(head, unit, repeats, skip, tail):
    def loss(w, x):
        for step in head:
            x = STEPS[step](x, w)
        first = x
        for _ in range(repeats):
            before = x
            for step in unit:
                x = STEPS[step](x, w)
            x = x + before if skip else x
        for step in tail:
            x = STEPS[step](x, w)
        return (x * first).mean()

    w, x = weights(3, 3), weights(2, 3)
    jaxpr = jax.make_jaxpr(loss)(w, x)
    blocks = find_blocks(jaxpr)
    assert len({block.name for block in blocks}) == len(blocks)
    assert all(block.inside_bytes > 0 for block in blocks)
    cut = apply_at_blocks(jaxpr, full)
    a = jax.jit(jax.value_and_grad(loss))(w, x)
    b = jax.jit(jax.value_and_grad(lambda w, x: cut(w, x)[0]))(w, x)
    np.testing.assert_allclose(a[0], b[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(a[1], b[1], rtol=1e-4, atol=1e-5)


def test_time_grows_with_the_program_and_no_faster():
    """Counted in calls of Python functions, since this machine's seconds are not another's."""
    import cProfile
    import pstats

    def calls(layers):
        jaxpr = jax.make_jaxpr(lambda ws, x: loop(ws, x).sum())([weights(D, D)] * layers, X)
        profile = cProfile.Profile()
        assert len(profile.runcall(find_blocks, jaxpr)) == layers
        return pstats.Stats(profile).total_calls

    assert calls(80) < 6 * calls(20)
