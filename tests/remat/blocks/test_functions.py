"""Blocks of functions without scopes: what is one, what is none, and what stays as it is round them."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxmem.errors import RematWithoutEffect
from jaxmem.remat import residual_bytes
from jaxmem.remat.blocks import apply_at_blocks, at_blocks
from tests.remat.blocks.models import (
    D,
    X,
    assert_same,
    blocks_of,
    full,
    layer,
    loop,
    names_of,
    scan,
    weights,
)


def test_layers_of_different_widths():
    ws = [weights(D, 16), weights(16, 12), weights(12, 20), weights(20, 4)]

    def loss(ws, x):
        for w in ws:
            x = jax.nn.gelu(x @ w)
        return x.sum()

    assert len(blocks_of(loss, ws, X)) == 4
    assert_same(loss, ws, X)


def test_scan_keeps_its_layout():
    def loss(ws, x):
        body = lambda c, w: ((layer(c[0], w), c[1] + 1), c[0].sum())  # noqa: E731
        (x, count), sums = jax.lax.scan(body, (x, 0), ws, reverse=True, unroll=2)
        return x.sum() * count + sums @ jnp.arange(4.0)

    args = weights(4, D, D), X
    (block,) = blocks_of(loss, *args)
    assert (block.kind, block.count) == ("scan", 4)
    new = jax.make_jaxpr(at_blocks(loss, full))(*args)
    old = jax.make_jaxpr(loss)(*args)
    (old_scan,), (new_scan,) = ([e for e in j.eqns if e.primitive.name == "scan"] for j in (old, new))
    for key in old_scan.params.keys() - {"jaxpr"}:
        assert new_scan.params[key] == old_scan.params[key]
    (body,) = new_scan.params["jaxpr"].eqns
    assert body.primitive.name == "remat2" and not body.params["prevent_cse"]
    assert_same(loss, *args)


def test_unrolled_blocks_are_protected_from_common_subexpression_elimination():
    jaxpr = jax.make_jaxpr(at_blocks(lambda ws, x: loop(ws, x).sum(), full))([weights(D, D)] * 3, X)
    blocks = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "remat2"]
    assert len(blocks) == 3 and all(eqn.params["prevent_cse"] for eqn in blocks)


def test_small_scans_are_no_blocks():
    def cumulative(w, x):
        return jax.lax.scan(lambda c, row: (c + row, c * row), x[0], x @ w)[1].sum()

    assert blocks_of(cumulative, weights(D, D), X) == ()


def test_large_scan_without_matmul_is_a_block():
    def loss(a, x):
        def step(h, row):
            decay = jnp.exp(-jnp.exp(jnp.sin(row * a)))
            return decay * h + jnp.tanh(row * h), None

        return jax.lax.scan(step, jnp.zeros_like(a), x)[0].sum()

    shapes = jax.ShapeDtypeStruct((256, 64), jnp.float32), jax.ShapeDtypeStruct((32, 64), jnp.float32)
    assert [block.kind for block in blocks_of(loss, *shapes)] == ["scan"]
    assert blocks_of(loss, weights(4, 8), weights(3, 8)) == ()


def test_scan_of_length_one_is_looked_into():
    def loss(ws, x):
        return jax.lax.scan(lambda c, _: (scan(ws, c), None), x, None, length=1)[0].sum()

    (block,) = blocks_of(loss, weights(3, D, D), X)
    assert block.count == 3
    assert_same(loss, weights(3, D, D), X)


@pytest.mark.parametrize("stack", [loop, scan])
def test_branches_of_cond(stack):
    def loss(ws, x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: stack(ws, x), lambda x: stack(ws, 2 * x), x).sum()

    ws = weights(3, D, D)
    assert len(blocks_of(loss, ws, X)) == (2 if stack is scan else 6)
    assert_same(loss, ws, X)


def test_cond_between_layers_belongs_to_its_block():
    def loss(ws, x):
        for w in ws:
            x = jax.lax.cond(x[0, 0] > 0, layer, lambda x, w: x, x, w)
        return x.sum()

    assert len(blocks_of(loss, [weights(D, D)] * 3, X)) == 3


def test_one_function_on_two_inputs():
    encoder = jax.jit(lambda ws, x: loop(ws, x))
    loss = lambda ws, x: (encoder(ws, x) * encoder(ws, 2 * x)).sum()  # noqa: E731
    names = names_of(loss, [weights(D, D)] * 3, X)
    assert len(names) == 6 and len(set(names)) == 6
    assert len(blocks_of(lambda ws, x: (scan(ws, x) * scan(ws, 2 * x)).sum(), weights(3, D, D), X)) == 2


def test_custom_rules_stay_in_force():
    @jax.custom_vjp
    def twice(x):
        return jnp.sin(x)

    twice.defvjp(lambda x: (jnp.sin(x), x), lambda x, g: (2 * g,))  # not the derivative of sin

    def loss(ws, x):
        for w in ws:
            x = jax.nn.relu(twice(x @ w)) + x
        return x.sum()

    assert len(blocks_of(loss, [weights(D, D)] * 3, X)) == 3
    assert_same(loss, [weights(D, D)] * 3, X)


@pytest.mark.parametrize("scanned", [False, True])
def test_checkpoints_of_the_users_own_are_left_alone(scanned):
    def loss(ws, x):
        if scanned:
            return jax.lax.scan(lambda c, w: (jax.checkpoint(layer)(c, w), None), x, ws)[0].sum()
        for w in ws:
            x = jax.checkpoint(layer)(x, w)
        return x.sum()

    assert blocks_of(loss, weights(3, D, D), X) == ()


@pytest.mark.parametrize("scanned", [False, True])
def test_prints_happen_once_and_in_order(scanned, capfd):
    def step(x, w, i):
        h = jnp.tanh(x @ w)
        jax.debug.print("layer {i} {h:.3f}", i=i, h=h.sum(), ordered=True)
        return x + jnp.tanh(h @ w)

    def loss(ws, x):
        if scanned:
            return jax.lax.scan(lambda x, wi: (step(x, *wi), None), x, (ws, jnp.arange(3)))[0].sum()
        for i, w in enumerate(ws):
            x = step(x, w, i)
        return x.sum()

    def printed(fn):
        jax.block_until_ready(jax.jit(jax.grad(fn))(weights(3, D, D), X))
        jax.effects_barrier()
        return re.findall(r"layer .*", capfd.readouterr().out)

    assert len(blocks_of(loss, weights(3, D, D), X)) == (1 if scanned else 3)
    expected = printed(loss)
    assert [line.split()[1] for line in expected] == ["0", "1", "2"]
    assert printed(at_blocks(loss, full)) == expected


def test_a_callback_whose_result_is_used_is_not_repeated():
    def loss(ws, x):
        for w in ws:
            h = jnp.tanh(x @ w)
            shape = jax.ShapeDtypeStruct((), jnp.float32)
            scale = jax.experimental.io_callback(lambda h: np.float32(1.0), shape, jax.lax.stop_gradient(h.sum()))
            x = x + scale * jnp.tanh(h @ w)
        return x.sum()

    assert blocks_of(loss, [weights(D, D)] * 3, X) == ()


@pytest.mark.parametrize("stack", [loop, scan])
def test_shard_map(stack):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    specs = PartitionSpec(), PartitionSpec("data")

    def loss(ws, x):
        inner = lambda ws, x: jax.lax.psum((stack(ws, x) ** 2).sum(), "data")  # noqa: E731
        return jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(ws, x)

    assert len(blocks_of(loss, weights(3, D, D), X)) == (1 if stack is scan else 3)
    assert_same(loss, weights(3, D, D), X)


def test_other_transformations_pass_through():
    fn = lambda ws, x: (loop(ws, x) ** 2).sum()  # noqa: E731
    cut = at_blocks(fn, full)
    ws = [weights(D, D)] * 2
    close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    close(jax.jvp(cut, (ws, X), (ws, X))[1], jax.jvp(fn, (ws, X), (ws, X))[1])
    batched = jnp.stack([X, 2 * X])
    close(jax.vmap(cut, (None, 0))(ws, batched), jax.vmap(fn, (None, 0))(ws, batched))
    second = lambda f: jax.grad(lambda x: (jax.grad(f, 1)(ws, x) ** 2).sum())(X)  # noqa: E731
    close(second(cut), second(fn), rtol=1e-4)


def test_nothing_repeats():
    loss = lambda w, x: layer(x, w).sum()  # noqa: E731
    args = weights(D, D), X
    assert blocks_of(loss, *args) == ()
    assert apply_at_blocks(jax.make_jaxpr(loss)(*args), None)(*args)[0] == loss(*args)
    with pytest.raises(RematWithoutEffect, match="a scan over layers, or layers that repeat.*memory.block"):
        jax.eval_shape(at_blocks(loss, full), *args)


@pytest.mark.parametrize(
    "layers, got",
    [
        (
            lambda w, x: jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w[None])[0],
            "got [0-9]+ equations with no scan of several",
        ),
        (lambda w, x: jax.checkpoint(lambda x: jnp.tanh(x @ w))(x), "got layers with checkpoints of their own"),
    ],
    ids=["scan of one step", "checkpoint"],
)
def test_what_was_looked_for_and_not_found_is_said_truly(layers, got):
    with pytest.raises(RematWithoutEffect, match=got):
        jax.eval_shape(at_blocks(lambda w, x: layers(w, x).sum(), full), weights(D, D), X)


def test_layers_that_grow_are_blocks_once_they_are_named():
    """Layer i adds up i outputs, so that no distance between layers comes twice."""

    def dense(scope, wrap, ws, x):
        outs = [x]
        for i, w in enumerate(ws):
            with scope(f"Layer_{i}"):
                outs.append(wrap(lambda w, *outs: layer(sum(outs), w))(w, *outs))
        return outs[-1].sum()

    args = [weights(D, D)] * 6, X
    bare = functools.partial(dense, lambda name: contextlib.nullcontext(), lambda block: block)
    named = functools.partial(dense, jax.named_scope, lambda block: block)
    marked = functools.partial(dense, jax.named_scope, jax.checkpoint)
    plain, cut, whole, by_hand = (
        residual_bytes(f, *args, argnums=0) for f in (bare, at_blocks(bare, full), at_blocks(named, full), marked)
    )
    assert whole == by_hand <= cut < plain
    assert [block.name for block in blocks_of(named, *args)] == [f"Layer_{i}" for i in range(6)]


def test_scopes_and_source_lines_stay():
    def loss(ws, x):
        for w in ws:
            with jax.named_scope("mixer"):
                x = layer(x, w)
        return x.sum()

    text = jax.jit(jax.grad(at_blocks(loss, full))).lower([weights(D, D)] * 3, X).as_text(debug_info=True)
    assert re.search(r"rematted_computation/mixer/dot_general", text)
    assert "models.py" in text


def test_wrap_is_told_names_and_scans():
    told = []

    def wrap(fn, *, scanned, name):
        told.append((name, scanned))
        return fn

    fn = lambda params, x: scan(params[0], loop(params[1], x)).sum()  # noqa: E731
    args = (weights(3, D, D), [weights(D, D)] * 2), X
    jax.eval_shape(at_blocks(fn, wrap), *args)
    assert told == [("loss[1/2]", False), ("loss[2/2]", False), ("scan", True)]
    assert [name for name, _ in told] == names_of(fn, *args)
