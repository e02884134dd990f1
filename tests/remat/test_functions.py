"""`checkpoint` round plain functions: any arguments, any transform, the same gradients, fewer residuals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.analysis import hlo_flops
from jaxmem.errors import InputError, UnknownPolicyError
from jaxmem.remat import checkpoint, residual_bytes

PRESETS = ("full", "dots", "dots_no_batch")
X = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32))
W = jnp.asarray(np.random.default_rng(1).normal(size=(8, 8)).astype(np.float32)) / 3


def layer(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


@pytest.mark.parametrize("preset", PRESETS)
def test_gradients_are_unchanged(preset):
    """Under jit, vmap, scan and a gradient of the gradient."""

    def losses(layer):
        def stacked(w, x):
            return jax.lax.scan(lambda x, _: (layer(w, x), None), x, length=2)[0].sum()

        def directional(w, x):
            return (jax.grad(lambda w: layer(w, x).sum())(w) ** 2).sum()

        return {
            "plain": jax.grad(lambda w, x: layer(w, x).sum()),
            "scan": jax.grad(stacked),
            "vmap": jax.vmap(jax.grad(lambda w, x: layer(w, x).sum()), (None, 0)),
            "grad of grad": jax.grad(directional),
        }

    def results(layer):
        return jax.jit(lambda w, x: {name: fn(w, x) for name, fn in losses(layer).items()})(W, X)

    got, want = results(checkpoint(layer, preset)), results(layer)
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_any_arguments_keep_their_meaning():
    """Positional, keyword, default, static Python values, None, pytrees with both."""
    seen = []

    @lambda fn: checkpoint(fn, "full")
    def block(x, scale=2.0, mask=None, *extra, train=False, mode="relu", **more):
        seen.append((type(scale), mask is None, train, mode, sorted(more)))
        y = jnp.maximum(x, 0) if mode == "relu" else jnp.tanh(x)
        y = y * scale + sum(extra)
        if mask is not None:
            y = y * mask["m"]
        return y if train else -y

    x = jnp.arange(3.0)
    np.testing.assert_allclose(block(x), -2 * x)
    np.testing.assert_allclose(block(x, 3.0, train=True), 3 * x)
    np.testing.assert_allclose(block(x, mask={"m": x, "unused": None}, scale=jnp.float32(1.0), train=True), x * x)
    np.testing.assert_allclose(
        block(x, 1.0, None, 5.0, x, mode="tanh", train=True, more=x), np.tanh(x) + 5 + x, rtol=1e-6
    )
    assert seen[0] == (float, True, False, "relu", [])
    assert seen[1] == (float, True, True, "relu", [])
    assert issubclass(seen[2][0], jax.core.Tracer) and seen[2][1:] == (False, True, "relu", [])
    assert seen[3] == (float, True, True, "tanh", ["more"])


def test_static_argnames_hold_arrays_back():
    """A numpy array that decides in Python; beside *args, **kwargs and positional-only parameters; a name alone."""

    def block(x, /, table, *rest, flag=True, **more):
        return x * float(table[0]) + sum(rest) if flag else x + more["z"]

    x, table = jnp.arange(3.0), np.array([4.0])
    static = checkpoint(block, "full", static_argnames=("table",))
    np.testing.assert_allclose(static(x, table), 4 * x)
    np.testing.assert_allclose(static(x, table, x, x), 6 * x)
    np.testing.assert_allclose(static(x, table=table, flag=False, z=1.0), x + 1)
    np.testing.assert_allclose(checkpoint(block, "full", static_argnames="table")(x, table), 4 * x)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.grad(lambda x: checkpoint(block, "full")(x, table).sum())(x)
    with pytest.raises(InputError, match="static_argnames among .*table.*; got typo"):
        checkpoint(block, "full", static_argnames=("typo",))(x, table)


def test_closed_over_values_are_differentiated():
    grad = jax.grad(lambda w: checkpoint(lambda x: layer(w, x), "full")(X).sum())(W)
    np.testing.assert_allclose(grad, jax.grad(lambda w: layer(w, X).sum())(W), rtol=1e-5, atol=1e-6)


def test_the_wrapper_looks_like_the_function():
    wrapped = checkpoint(layer, "dots")
    assert wrapped.__name__ == "layer" and wrapped.__wrapped__ is layer


def test_none_is_the_function_itself():
    assert checkpoint(layer, "none") is layer


@pytest.mark.parametrize("policy", ["Full", "dots_saveable", None])
def test_an_unknown_policy_lists_the_presets(policy):
    with pytest.raises(UnknownPolicyError, match="none, full, dots"):
        checkpoint(layer, policy)(W, X)


@pytest.mark.parametrize("target", [3, dict, "layer"])
def test_what_is_not_a_block_is_refused(target):
    with pytest.raises(InputError, match="Wrap the function that computes the block"):
        checkpoint(target, "full")


def tanh_count(scanned, layers=4):
    """tanh instructions of a compiled, unrolled stack of blocks of two tanh each."""
    block = checkpoint(layer, "full", scanned=scanned)

    def loss(w, x):
        for _ in range(layers):
            x = block(w, x)
        return x.sum()

    text = jax.jit(jax.grad(loss)).lower(W, X).compile().as_text()
    return text.count(" tanh(")


def test_cse_does_not_undo_the_recomputation():
    """Case 25: unrolled, the barrier is there and every block is computed twice; without it XLA merges the two.

    The last tanh of a block is not needed again, since tanh' is a function of tanh, unless the block is recomputed.
    """
    assert tanh_count(scanned=False) > tanh_count(scanned=True) >= 2 * 4


def test_a_scanned_block_is_recomputed_without_the_barrier():
    """Case 25: inside a scan the body is compiled once forward and once backward, so nothing can be merged."""

    def flops(block):
        loss = lambda w, x: jax.lax.scan(lambda x, _: (block(w, x), None), x, length=3)[0].sum()  # noqa: E731
        return hlo_flops(jax.jit(jax.grad(loss)).lower(W, X).compile().as_text())

    plain, remat = flops(layer), flops(checkpoint(layer, "full", scanned=True))
    product = 2 * 4 * 8 * 8
    assert plain.flops == 3 * 2 * 3 * product  # 3 layers of 2 products, each with 2 in the backward pass
    # The second product's value is tanh's argument, of which only tanh itself is needed: 1 or 2 are repeated a layer.
    assert 3 * product <= remat.flops - plain.flops <= 3 * 2 * product
    for scanned, barriers in ((True, 0), (False, 1)):
        fn = jax.jit(jax.grad(lambda w, scanned=scanned: checkpoint(layer, "full", scanned=scanned)(w, X).sum()))
        assert fn.lower(W).as_text().count("optimization_barrier") == barriers


def test_full_is_nothing_saved():
    """Case 28: 'full' is jax's nothing_saveable, by residual bytes and by value, never 'save everything'."""
    policies = jax.checkpoint_policies
    stacks = {
        "full": checkpoint(layer, "full"),
        "nothing": jax.checkpoint(layer, policy=policies.nothing_saveable),
        "everything": jax.checkpoint(layer, policy=policies.everything_saveable),
        "plain": layer,
    }

    def stack(block):
        return lambda w, x: jax.lax.scan(lambda x, _: (block(w, x), None), x, length=5)[0].sum()

    size = {name: residual_bytes(stack(block), W, X) for name, block in stacks.items()}
    assert size["full"] == size["nothing"] == 5 * X.nbytes  # the input of each of 5 blocks
    assert size["everything"] > size["full"] and size["plain"] > size["full"]


def test_the_outside_of_a_scan_is_another_place_than_its_body():
    """Case 28: remat round the scan keeps only its inputs, and peaks no lower; in the body it keeps one x a layer."""
    body = lambda block: lambda x, _: (block(W, x), None)  # noqa: E731
    inside = lambda x: jax.lax.scan(body(checkpoint(layer, "full", scanned=True)), x, length=5)[0].sum()  # noqa: E731
    outside = checkpoint(lambda x: jax.lax.scan(body(layer), x, length=5)[0].sum(), "full")
    assert residual_bytes(outside, X) == 0
    assert residual_bytes(inside, X) == 5 * X.nbytes
    temps = [
        jax.jit(jax.grad(fn)).lower(jnp.ones((64, 8))).compile().memory_analysis().temp_size_in_bytes
        for fn in (inside, outside)
    ]
    assert temps[0] < temps[1]
