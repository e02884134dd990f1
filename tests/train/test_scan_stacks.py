"""Scans of a step that fill their stacks when they begin: where, what is said of it, and that no number changes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.interpreters import mlir

from jaxmem import MemoryConfig, Workload, make_train_step
from jaxmem.train import _scan_stacks
from tests.deviceless.compiling import compile_on

CONCERNED = jax.__version_info__ < (0, 12)


def blocks(params, x, *, memory):
    """Four blocks in a Python loop; each a scan that has stacks of outputs, and keeps others for its backward pass."""

    def block(x, w):
        end, ys = lax.scan(lambda c, _: ((c := jnp.sin(c @ w) + c), c.sum(-1)), x, None, length=32)
        return end + ys.mean(0)[:, None]

    for w in params:
        x = memory.block(block)(x, w)
    return jnp.mean(x)


@pytest.fixture
def on_cpu(monkeypatch):
    """The rule for GPUs, on the backend that can run here."""
    rules = mlir._platform_specific_lowerings["cpu"]
    before = dict(rules)
    _scan_stacks._register.__wrapped__("cpu")
    yield
    rules.clear()
    rules.update(before)


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("remat", ["none", "full"])
@pytest.mark.parametrize("wrapped", ["plain", "vmap", "scan"])
def test_no_bit_of_a_gradient_changes(remat, wrapped):
    memory = MemoryConfig(remat=remat)
    workload = Workload(blocks, [jnp.eye(8) * 0.1] * 4, jnp.ones((4, 8)), optax.sgd(0.1))
    loss = make_train_step(workload, memory).spec.loss()
    gradient = jax.value_and_grad(lambda params, x: loss(params, x))
    fn = {
        "plain": gradient,
        "vmap": jax.vmap(gradient, in_axes=(None, 0)),
        "scan": lambda params, xs: lax.map(lambda x: gradient(params, x), xs),
    }[wrapped]
    keys = jax.random.split(jax.random.key(0), 5)
    params = [jax.random.normal(key, (8, 8)) * 0.3 for key in keys[:4]]
    x = jax.random.normal(keys[4], (4, 8) if wrapped == "plain" else (3, 4, 8))
    plain = jax.jit(lambda *args: fn(*args)).lower(params, x)
    stacks = [(32, 4, 8), (32, 4), (32, 3, 4, 8), (32, 3, 4)]
    with _scan_stacks.apart(frozenset(stacks)):
        apart = jax.jit(lambda *args: fn(*args)).lower(params, x)
    barriers = [lowered.as_text().count("optimization_barrier") for lowered in (plain, apart)]
    assert barriers[1] > barriers[0]
    for a, b in zip(*map(jax.tree.leaves, (plain.compile()(params, x), apart.compile()(params, x))), strict=True):
        np.testing.assert_array_equal(a, b)


def test_only_stacks_of_the_shapes_are_filled_late():
    x = jax.ShapeDtypeStruct((8,), jnp.float32)

    def barriers(shapes, stacks=True):
        scan = lambda x: lax.scan(lambda c, _: (c * 2, c if stacks else None), x, None, length=4)  # noqa: E731
        with _scan_stacks.apart(frozenset(shapes)):
            lowered = jax.jit(scan).trace(x).lower(lowering_platforms=("cuda",))
        return lowered.as_text().count("optimization_barrier")

    assert barriers({(4, 8)}) == 1
    assert barriers({(4, 9)}) == barriers({(4, 8)}, stacks=False) == barriers(()) == 0


def said(fn, *shapes):
    return _scan_stacks.told(jax.make_jaxpr(fn)(*shapes).jaxpr, "gpu")


@pytest.mark.skipif(not CONCERNED, reason="XLA:GPU does it by itself")
def test_a_report_counts_the_scans_that_would_share_their_zeros():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    stack = lambda x, n: lax.scan(lambda c, _: (jnp.sin(c), c), x, None, length=n)  # noqa: E731
    assert said(lambda x: (stack(x, 8), stack(x, 9)), x) == ()
    (line,) = said(lambda x: (stack(x, 8), jax.checkpoint(lambda x: stack(x, 8))(x), stack(x, 9)), x)
    assert line.startswith("2 scans, whose stacks")
    assert said(lambda x: lax.map(lambda x: stack(x, 8), x[None]), x) == ()
    assert _scan_stacks.told(jax.make_jaxpr(lambda x: (stack(x, 8), stack(x, 8)))(x).jaxpr, "tpu") == ()


def test_it_can_go_when_no_supported_compiler_fills_them_all_at_once():
    """Without it the stacks of four recomputed blocks are alive at once, up to JAX 0.12."""

    def loss(params, x):
        for w in params:
            x = jax.checkpoint(lambda x, w: lax.scan(lambda c, _: (jnp.sin(c @ w) + c, None), x, None, length=64)[0])(
                x, w
            )
        return jnp.mean(x)

    shape = jax.ShapeDtypeStruct((512, 128), jnp.float32)
    weights = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 4
    analysis = compile_on("gpu-h100", jax.grad(loss), weights, shape).memory_analysis()
    assert analysis is not None
    stacks = 2 * 64 * shape.size * 4  # of one block
    assert (analysis.temp_size_in_bytes > 3 * stacks) == CONCERNED
