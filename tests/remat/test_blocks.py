"""The block cutter finds what a person would mark, and changes nothing but what is kept."""

import contextlib
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, PartitionSpec

from jaxmem.errors import RematWithoutEffect
from jaxmem.remat import checkpoint, residual_bytes
from jaxmem.remat.blocks import apply_at_blocks, at_blocks, find_blocks
from tests.remat import block_models as models
from tests.remat.block_models import D, layer, loop, scan, weights

X = weights(4, D)
TOKENS = weights(2, 4, D)


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


# -- functions without scopes ----------------------------------------------------------------------


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
    assert "block_models.py" in text


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


# -- Flax ---------------------------------------------------------------------------------------------


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
