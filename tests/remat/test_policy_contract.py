"""Every policy on a scanned function, and some on function, linen, nnx × scanned, unrolled: the gradients of the plain
model, and the dots recomputed that the policy asks for. (`tests/examples/test_names.py` has every preset on a module.)

A layer has the products qkv (2 D → 3 D units of work), scores and context (batched), out and mlp; each policy keeps
some of them. The sizes differ, so that FLOPs tell which product was computed again.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from jaxmem.analysis import hlo_flops, jaxpr_flops
from jaxmem.policy import PRESETS, Policy
from jaxmem.remat import checkpoint
from tests.deviceless.compiling import compile_on

B, T, D, LAYERS = 2, 4, 8, 2
FLOPS = {  # of one layer's forward pass
    "qkv_proj": 2 * B * T * D * 3 * D,
    "scores": 2 * B * T * T * D,
    "context": 2 * B * T * T * D,
    "out_proj": 2 * B * T * D * D,
    "mlpwi": 2 * B * T * D * 2 * D,
    "mlpwo": 2 * B * T * 2 * D * D,
}
PLAIN = LAYERS * 3 * sum(FLOPS.values())  # each product has two in the backward pass
# The layer's output is x + mlpwo: nobody needs mlpwo's value for a gradient, so nobody computes it again.
NEVER = {"mlpwo"}
# The products that each policy computes again in the backward pass.
RECOMPUTED = {
    "none": set(),
    "full": {"qkv_proj", "scores", "context", "out_proj", "mlpwi"},
    "dots": set(),
    "dots_no_batch": {"scores", "context"},
    "minimal": {"scores", "context"},
    "minimal_with_context": {"scores"},
    "save_dot_with_context_except_mlp": {"scores", "mlpwi"},
    "save_dot_except_mlpwi": {"scores", "context", "mlpwi"},
    "save_dot_except_mlp": {"scores", "context", "mlpwi"},
    "save_qkv_proj": {"scores", "context", "out_proj", "mlpwi"},
    "save_out_proj": {"qkv_proj", "scores", "context", "mlpwi"},
    "qkv_proj_offloaded": {"scores", "context", "out_proj", "mlpwi"},
    "minimal_offloaded": {"scores", "context"},
}
POLICIES = {
    **{name: name for name in RECOMPUTED},
    "names and dots": Policy(save=("context",)) | Policy(dots="no_batch"),
    "names and offload": Policy(save=("re:mlp.*",)) | Policy(offload=("qkv_proj",)),
    "exception": Policy(save=("re:.*",), recompute=("scores", "context")),
}
RECOMPUTED |= {
    "names and dots": {"scores"},
    "names and offload": {"scores", "context", "out_proj"},
    "exception": {"scores", "context"},
}


def layer(p, x):
    """`(B, T, D) → (B, T, D)`; tanh between the products, so that each is needed for the gradient of the next."""
    qkv = jnp.tanh(checkpoint_name(x @ p["qkv"], "qkv_proj"))
    q, k, v = jnp.split(qkv, 3, axis=-1)
    scores = jnp.tanh(checkpoint_name(jnp.einsum("bqd,bkd->bqk", q, k), "scores"))
    context = jnp.tanh(checkpoint_name(jnp.einsum("bqk,bkd->bqd", scores, v), "context"))
    x = jnp.tanh(x + checkpoint_name(context @ p["out"], "out_proj"))
    hidden = jnp.tanh(checkpoint_name(x @ p["wi"], "mlpwi"))
    return x + checkpoint_name(hidden @ p["wo"], "mlpwo")


SHAPES = {"qkv": (D, 3 * D), "out": (D, D), "wi": (D, 2 * D), "wo": (2 * D, D)}


def params():
    rng = np.random.default_rng(0)
    return {
        name: jnp.asarray(rng.normal(size=(LAYERS, *shape)).astype(np.float32)) / 3 for name, shape in SHAPES.items()
    }


X = jnp.asarray(np.random.default_rng(1).normal(size=(B, T, D)).astype(np.float32))


class Linen(nn.Module):
    """The layer with its parameters declared."""

    @nn.compact
    def __call__(self, x, _=None):
        p = {name: self.param(name, nn.initializers.zeros, shape) for name, shape in SHAPES.items()}
        y = layer(p, x)
        return y, None


class Nnx(nnx.Module):
    def __init__(self, p):
        for name in SHAPES:
            setattr(self, name, nnx.Param(p[name]))

    def __call__(self, x):
        return layer({name: getattr(self, name)[...] for name in SHAPES}, x)


def function_loss(policy, scanned):
    block = checkpoint(layer, policy, scanned=scanned)

    def loss(p, x):
        if scanned:
            return (jax.lax.scan(lambda x, each: (block(each, x), None), x, p)[0] ** 2).sum()
        for i in range(LAYERS):
            x = block({name: leaf[i] for name, leaf in p.items()}, x)
        return (x**2).sum()

    return loss


def linen_loss(policy, scanned):
    block = checkpoint(Linen, policy, scanned=scanned)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            if scanned:
                stack = nn.scan(block, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
                return stack(name="blocks")(x, None)[0]
            for i in range(LAYERS):
                x, _ = block(name=f"block_{i}")(x, None)
            return x

    def loss(p, x):
        tree = {"blocks": p} if scanned else {f"block_{i}": {n: v[i] for n, v in p.items()} for i in range(LAYERS)}
        return (Model().apply({"params": tree}, x) ** 2).sum()

    return loss


def nnx_loss(policy, scanned):
    def loss(p, x):
        if scanned:
            stack = nnx.scan(
                lambda x, block: checkpoint(block, policy, scanned=True)(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry
            )
            return (stack(x, Nnx(p)) ** 2).sum()
        for i in range(LAYERS):
            x = checkpoint(Nnx({name: leaf[i] for name, leaf in p.items()}), policy)(x)
        return (x**2).sum()

    return loss


LOSSES = {"function": function_loss, "linen": linen_loss, "nnx": nnx_loss}


@functools.cache
def plain_gradients():
    return jax.tree.map(np.asarray, jax.jit(jax.grad(function_loss("none", True), argnums=(0, 1)))(params(), X))


def test_every_preset_is_here():
    assert set(PRESETS) - set(RECOMPUTED) == {"save_qkv"}
    assert PRESETS["save_qkv"] == PRESETS["save_qkv_proj"]


def expected(policy):
    assert not RECOMPUTED[policy] & NEVER
    return LAYERS * sum(FLOPS[name] for name in RECOMPUTED[policy])


SOME = ("full", "dots_no_batch", "names and offload")  # nothing; by operation; by name, to two places
CELLS = [(policy, "function", True) for policy in POLICIES]
CELLS += [cell for cell in itertools.product(SOME, LOSSES, (True, False)) if cell not in CELLS]


@pytest.mark.parametrize("policy, kind, scanned", CELLS)
def test_gradients_and_recomputed_dots(policy, kind, scanned):
    traced = jax.jit(jax.grad(LOSSES[kind](POLICIES[policy], scanned), argnums=(0, 1))).trace(params(), X)
    compiled = traced.lower().compile()
    got = compiled(params(), X)
    for (path, g), want in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(plain_gradients()), strict=True
    ):
        np.testing.assert_allclose(g, want, rtol=2e-4, atol=2e-5, err_msg=jax.tree_util.keystr(path))
    assert jaxpr_flops(traced.jaxpr).recompute == expected(policy)
    extra = hlo_flops(compiled.as_text()).flops - PLAIN
    # Outside a scan, XLA:CPU drops the barriers and then merges what it computes twice (field notes, §2).
    assert extra == expected(policy) if scanned else 0 <= extra <= expected(policy)


@pytest.mark.parametrize("target", ["tpu-v5e:1x1", "gpu-h100"])
@pytest.mark.parametrize(
    "policy, scanned", [("full", False), ("minimal_with_context", True), ("names and offload", True)]
)
def test_recomputed_dots_on_a_target(policy, scanned, target):
    """As the compilers of the real chips leave them, which respect the barriers of unrolled blocks."""
    grad = jax.grad(function_loss(POLICIES[policy], scanned), argnums=(0, 1))
    compiled = compile_on(target, grad, params(), X)
    assert hlo_flops(compiled.as_text()).flops - PLAIN == expected(policy)
    assert (compiled.memory_analysis().host_temp_size_in_bytes > 0) == ("offload" in policy)
