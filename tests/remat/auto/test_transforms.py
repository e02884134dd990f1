"""A function under a budget inside and outside of JAX's transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.remat import nested_scan
from jaxmem.remat.auto import auto
from tests.remat.auto.helpers import assert_same, count, gradient_jaxpr, gradients

X = jnp.linspace(-1.0, 1.0, 8).reshape(2, 4)
W = jnp.eye(4) * 0.5 + 0.1
STACK = jnp.stack([W, 0.5 * W, -W])


def layer(x, w):
    return jnp.tanh(jnp.sin(x @ w)) * x


def scanned(ws, x):
    return lax.scan(lambda h, w: (layer(h, w), h.sum()), x, ws)


def loop(ws, x):
    for w in ws:
        x = layer(x, w)
    return x


def same(transformed, *args, shares=(0.0, 0.9)):
    """`transformed(under)`: a function made with `under(fn)`, plain and under a budget."""
    want = gradients(transformed(lambda fn: fn), *args)
    for share in shares:
        got = gradients(transformed(lambda fn: auto(fn, share)), *args)  # noqa: B023  used at once
        assert jax.tree.structure(got) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_jit_inside_and_outside():
    same(lambda under: jax.jit(under(jax.jit(scanned))), STACK, X)


def test_vmap_inside_and_outside():
    per_row = jax.vmap(lambda x, w: layer(layer(x, w), w), in_axes=(0, None))
    same(lambda under: lambda w, x: under(per_row)(x, w), W, X)
    same(lambda under: lambda w, x: jax.vmap(under(loop), (None, 0))(w, x), STACK, X)


def test_gradient_of_a_gradient_and_hessian():
    same(lambda under: lambda w, x: jax.grad(lambda x: under(loop)(w, x).sum())(x), STACK, X)
    same(lambda under: under(lambda w, x: jax.grad(lambda x: loop(w, x).sum())(x)), STACK, X)
    small = lambda x: jnp.sin(jnp.sin(x) @ W[:, 0])  # noqa: E731
    want = jax.jit(jax.hessian(small))(X[0])
    np.testing.assert_allclose(jax.jit(jax.hessian(auto(small, 0.3)))(X[0]), want, rtol=1e-4, atol=1e-6)


def test_in_a_scan_of_another_and_of_itself():
    same(lambda under: lambda ws, x: lax.scan(lambda h, w: (under(layer)(h, w), None), x, ws)[0], STACK, X)
    same(lambda under: under(lambda ws, x: under(loop)(ws, x) + under(scanned)(ws, x)[0]), STACK, X)


def test_a_collective_is_kept_and_described():
    ring = [(i, (i + 1) % 4) for i in range(4)]
    step = lambda x, w: (jnp.tanh(lax.ppermute(x, "d", ring) @ w), None)  # noqa: E731
    passed = jax.shard_map(
        lambda ws, x: lax.scan(step, x, ws)[0], mesh=mesh(), in_specs=(P(), P("d")), out_specs=P("d")
    )
    for share in (0.0, 0.95):
        kept = {value.op for value in auto(passed, share).solve(STACK, BATCH).values if value.fate == "keep"}
        assert "ppermute" in kept


def test_checkpoint_and_nested_scan_of_the_users_own():
    same(lambda under: under(lambda ws, x: jax.checkpoint(loop)(ws, x) * loop(ws, x)), STACK, X)
    step = lambda h, w: (layer(h, w), None)  # noqa: E731
    # Which keeps nothing that could be left out.
    twice = lambda ws, x: nested_scan(step, x, jnp.concatenate([ws, ws]), segment=2)[0]  # noqa: E731
    same(lambda under: under(twice), STACK, X, shares=(0.0,))


def test_branches_and_loops():
    def loss(ws, x):
        x = lax.cond(x.sum() > 5, lambda x: scanned(ws, x)[0], lambda x: loop(ws, x), x)
        return lax.fori_loop(0, 3, lambda i, h: layer(h, ws[i]), x)

    same(lambda under: under(loss), STACK, X)


def test_dropout_has_one_mask_and_keys_are_no_floats():
    def loss(ws, x, key):
        for i, w in enumerate(ws):
            keep = jax.random.bernoulli(jax.random.fold_in(key, i), 0.5, x.shape)
            x = jnp.where(keep, layer(x, w), x)
        return x, key

    assert_same(loss, STACK, X, jax.random.key(0))


def test_mixed_precision_and_names():
    def loss(ws, x):
        for w in ws:
            x = checkpoint_name(layer(x.astype(jnp.bfloat16), w.astype(jnp.bfloat16)), "h").astype(jnp.float32)
        return x, x.astype(jnp.float16)

    assert_same(loss, STACK, X)


def test_forward_mode_is_refused_by_jax():
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(auto(loop, 0.5), (list(STACK), X), (list(STACK), X))


def test_donation():
    made = jax.jit(
        lambda ws, x: jax.tree.map(lambda a, b: a - b, ws, jax.grad(lambda ws: auto(loop, 0.4)(ws, x).sum())(ws)),
        donate_argnums=0,
    )
    want = STACK - gradients(loop, STACK, X)[1]
    np.testing.assert_allclose(made(STACK + 0, X), want, rtol=1e-5, atol=1e-6)


# -- several devices -------------------------------------------------------------------------------


@functools.cache
def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4,), ("d",), axis_types=(kind,), devices=jax.devices()[:4])


def rows(x, kind=AxisType.Auto):
    return jax.device_put(x, NamedSharding(mesh(kind), P("d")))


BATCH = jnp.linspace(-1.0, 1.0, 32).reshape(8, 4)


@pytest.mark.parametrize("form", [loop, lambda ws, x: scanned(ws, x)[0]], ids=["loop", "scan"])
def test_a_sharded_batch(form):
    want = gradients(form, STACK, BATCH)[1]
    got = jax.jit(jax.grad(lambda ws, x: auto(form, 0.4)(ws, x).sum()))(STACK, rows(BATCH))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def split(ws, x):
    """Weights in shards: each layer gathers them."""
    for w in ws:
        whole = lax.all_gather(w, "d", axis=0, tiled=True)
        x = jnp.tanh(jnp.sin(x @ whole)) * lax.psum(x, "d")
    return x


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize("outside", [True, False])
def test_shard_map_outside_and_inside(outside, check):
    mapped = functools.partial(
        jax.shard_map, mesh=mesh(), in_specs=([P("d")] * 3, P("d")), out_specs=P("d"), check_vma=check
    )
    plain = mapped(split)
    made = mapped(auto(split, 0.6)) if outside else auto(plain, 0.6)
    args = list(STACK), BATCH
    gradient = lambda fn: jax.jit(jax.grad(lambda *args: jnp.sin(fn(*args)).sum(), (0, 1)))(*args)  # noqa: E731
    want, got = gradient(plain), gradient(made)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_collectives_are_not_run_again():
    mapped = functools.partial(jax.shard_map, mesh=mesh(), in_specs=([P("d")] * 3, P("d")), out_specs=P("d"))
    plain = gradient_jaxpr(mapped(split), list(STACK), BATCH).jaxpr
    for fn in (mapped(auto(split, 0.0)), auto(mapped(split), 0.0)):
        made = gradient_jaxpr(fn, list(STACK), BATCH).jaxpr
        for name in ("all_gather", "psum", "psum_invariant", "reduce_scatter"):
            assert count(made, name) == count(plain, name), name
        assert count(made, "sin") > count(plain, "sin")


def test_a_mesh_of_explicit_axes():
    with jax.set_mesh(mesh(AxisType.Explicit)):
        args = STACK, rows(BATCH, AxisType.Explicit)
        want, got = (jax.jit(jax.grad(lambda *a, fn=fn: fn(*a).sum()))(*args) for fn in (loop, auto(loop, 0.4)))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
