"""A policy reaches what is recomputed as a whole: the steps of a nested scan, scans in the user's own checkpoints."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, PartitionSpec

from jaxmem import MemoryConfig, Policy, Workload, compare, make_train_step
from jaxmem.errors import RematWithoutEffect, UnmatchedNamesError
from jaxmem.remat import checkpoint, nested_scan, residual_bytes
from jaxmem.remat.blocks import at_blocks, find_blocks
from tests.deviceless.compiling import compile_on

LAYERS, SEGMENT, ROWS, WIDTH = 16, 4, 64, 16
CARRY = ROWS * WIDTH * 4  # bytes
WS = jnp.asarray(np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32)) / WIDTH
X = jnp.asarray(np.random.default_rng(1).normal(size=(ROWS, WIDTH)).astype(np.float32))


def layer(x, w):
    """Three values to keep besides the input."""
    hidden = checkpoint_name(jnp.tanh(x @ w), "hidden")
    return x + jnp.sin(jnp.tanh(hidden @ w)), None


def nested(policy="full", segment=SEGMENT, body=layer, **cuts):
    def loss(ws, x):
        cut = cuts or {"segment": segment}
        return (nested_scan(body, x, ws, policy=policy, **cut)[0] ** 2).mean()

    return loss


def by_hand(outer=jax.checkpoint, inner=lambda fn: fn):
    """Scan in scan, the segments in a checkpoint of the user's own."""

    def loss(ws, x):
        segment = outer(lambda x, ws: jax.lax.scan(inner(layer), x, ws)[0])
        ws = ws.reshape(LAYERS // SEGMENT, SEGMENT, WIDTH, WIDTH)
        return (jax.lax.scan(lambda x, ws: (segment(x, ws), None), x, ws)[0] ** 2).mean()

    return loss


def whole(ws, x):
    return jax.checkpoint(lambda ws, x: (jax.lax.scan(layer, x, ws)[0] ** 2).mean())(ws, x)


def policy_at_blocks(loss, policy):
    return at_blocks(loss, lambda fn, *, scanned, name: checkpoint(fn, policy, scanned=scanned))


def temp_bytes(loss, target=None, args=(WS, X)):
    grad = jax.value_and_grad(loss, argnums=(0, 1))
    compiled = jax.jit(grad).lower(*args).compile() if target is None else compile_on(target, grad, *args)
    return compiled.memory_analysis().temp_size_in_bytes


@functools.cache
def plain():
    return jax.jit(jax.value_and_grad(lambda ws, x: (jax.lax.scan(layer, x, ws)[0] ** 2).mean(), (0, 1)))(WS, X)


def assert_exact(loss):
    compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(WS, X).compile()
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, rtol=2e-5, atol=1e-6), compiled(WS, X), plain())
    return compiled


LOSSES = {
    "nested": nested("none"),
    "remainder": nested("none", segment=5),
    "levels": nested("none", levels=3),
    "one step": nested(segment=1),
    "one segment": nested(segment=LAYERS),
    "by hand": by_hand(),
    "by hand, a policy": by_hand(lambda fn: checkpoint(fn, Policy(save=("hidden",)), scanned=True)),
    "whole loss": whole,
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_steps_of_segments_are_blocks(name):
    loss = LOSSES[name]
    (block,) = find_blocks(jax.make_jaxpr(loss)(WS, X))
    assert (block.kind, block.count) == ("scan", LAYERS)
    if name.startswith("one"):  # a checkpoint of each step, which the policy replaces
        kept = {policy: residual_bytes(policy_at_blocks(loss, policy), WS, X) for policy in ("full", "dots")}
        assert kept["dots"] - kept["full"] == 2 * LAYERS * CARRY
        assert_exact(policy_at_blocks(loss, "dots"))
        return
    marked = policy_at_blocks(loss, "full")
    assert residual_bytes(marked, WS, X) == residual_bytes(loss, WS, X)  # the gain is in the backward pass
    compiled = assert_exact(marked)
    assert compiled.memory_analysis().temp_size_in_bytes < temp_bytes(loss)


@pytest.mark.parametrize("target", [None, "gpu-h100"])
def test_memory_is_that_of_the_policy_given_to_the_scan(target):
    """With "full" the very same, whatever the scan's own policy is; "dots" lies between it and "none"."""
    args = jax.ShapeDtypeStruct((64, 128, 128), jnp.float32), jax.ShapeDtypeStruct((4096, 128), jnp.float32)
    full, dots, none = (temp_bytes(nested(policy, 8), target, args) for policy in ("full", "dots", "none"))
    assert full < dots < none
    for given, policy, want in (("none", "full", full), ("full", "dots", dots)):
        assert temp_bytes(policy_at_blocks(nested(given, 8), policy), target, args) == pytest.approx(want, rel=0.03)


def test_scans_in_the_users_checkpoints_need_less_on_a_gpu():
    args = jax.ShapeDtypeStruct((LAYERS, 16, 16), jnp.float32), jax.ShapeDtypeStruct((4096, 16), jnp.float32)
    before, after = (temp_bytes(each, "gpu-h100", args) for each in (by_hand(), policy_at_blocks(by_hand(), "full")))
    assert before > 1.5 * after


def wrapped_in(transform):
    loss = nested("none")
    if transform == "jit":
        return jax.jit(loss)
    if transform == "cond":
        return lambda ws, x: jax.lax.cond(x[0, 0] < 100, loss, lambda ws, x: x.sum(), ws, x)
    if transform == "vmap":
        return lambda ws, x: jax.vmap(loss, in_axes=(None, 0))(ws, x[:, None]).mean()
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    specs = PartitionSpec(), PartitionSpec("data")
    inner = lambda ws, x: jax.lax.pmean(loss(ws, x), "data")  # noqa: E731
    return jax.shard_map(inner, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())


@pytest.mark.parametrize("transform", ["jit", "cond", "vmap", "shard_map"])
def test_under_transformations(transform):
    loss = wrapped_in(transform)
    assert [block.count for block in find_blocks(jax.make_jaxpr(loss)(WS, X))] == [LAYERS]
    marked = policy_at_blocks(loss, "full")
    assert assert_exact(marked).memory_analysis().temp_size_in_bytes < temp_bytes(loss)


def test_dropout_keys_counts_and_outputs():
    keys = jax.random.split(jax.random.key(0), LAYERS)

    def loss(scan, ws, x):
        def body(carry, each):
            w, key, i = each
            x, count = carry
            x = x + jnp.tanh(x @ w) * jax.random.bernoulli(key, 0.8, x.shape)
            return (x, count + i), {"norm": jnp.sum(x**2), "i": i}

        (x, count), ys = scan(body, (x, jnp.int32(0)), (ws, keys, jnp.arange(LAYERS)))
        return (x**2).mean() + ys["norm"].mean() + 0.0 * (count + ys["i"].sum())

    want = jax.jit(jax.grad(functools.partial(loss, jax.lax.scan)))(WS, X)
    for policy in ("full", "dots"):
        marked = policy_at_blocks(functools.partial(loss, functools.partial(nested_scan, segment=5)), policy)
        np.testing.assert_allclose(jax.jit(jax.grad(marked))(WS, X), want, rtol=1e-4, atol=1e-5)


def test_all_layers_have_checkpoints_already():
    loss = by_hand(inner=jax.checkpoint)
    assert find_blocks(jax.make_jaxpr(loss)(WS, X)) == ()
    with pytest.raises(RematWithoutEffect, match="checkpoints of their own.*Take the checkpoints out"):
        jax.eval_shape(policy_at_blocks(loss, "full"), WS, X)


# -- under a train step --------------------------------------------------------------------------------


def step_of(loss, remat):
    return make_train_step(Workload(loss, WS, X, optax.sgd(0.1)), MemoryConfig(remat=remat))


def with_handle(params, batch, *, memory):
    return (nested_scan(memory.block(layer, scanned=True), batch, params, segment=SEGMENT)[0] ** 2).mean()


@pytest.mark.parametrize("loss", [nested(), nested("none"), by_hand(), with_handle])
def test_a_step_checks_names_where_they_are_offered(loss):
    names = Policy(save=("hidden",))
    step = step_of(loss, names)
    assert step.examine().names == ("hidden",) and step.examine().blocks == 1
    state, _ = step(step.init(), X)
    np.testing.assert_allclose(state.params, WS - 0.1 * plain()[1][0], rtol=1e-5, atol=1e-6)
    with pytest.raises(UnmatchedNamesError, match="Did you mean hidden"):
        step_of(loss, Policy(save=("hiden",))).lower()


def test_a_marked_body_is_the_policy_of_its_segment():
    """Residuals of the forward pass are the same whatever the policy, so `compare` does not take them for no effect."""
    work = Workload(with_handle, WS, X, optax.sgd(0.1))
    rows = compare({remat: MemoryConfig(remat=remat) for remat in ("none", "full", "dots")}, work, target="cpu")
    none, full, dots = (rows[remat] for remat in ("none", "full", "dots"))
    assert none.saved_residual_bytes == full.saved_residual_bytes == dots.saved_residual_bytes
    # Without a mark, nested_scan's own default is "full". "dots" keeps two products of each step of one segment.
    assert none.temp_bytes == full.temp_bytes < dots.temp_bytes
    assert full.recompute_flops > dots.recompute_flops > 0
