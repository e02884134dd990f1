"""The model stacks of the benchmarks' tables, in plain JAX: shapes in, a scalar loss and its parameters out.

Values have MaxText's names: the projections as the attention uses them (a Llama's query and key after their rotary
positions), the attention's context, the output projection, and in the MLP the input of the activation and the output
of the last product.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

Policy = Callable[..., Any] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stack:
    """A decoder of `layers` equal layers on tokens `(batch, time)`, with embedding and softmax cross-entropy.

    Args:
      layer: "gpt" (fused qkv, GELU, MLP of 4 x width) or "llama" (rotary positions, grouped queries, SwiGLU).
      tied: whether the embedding is the output layer too.
    """

    layer: str
    batch: int
    time: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    vocabulary: int
    layers: int
    dtype: str
    tied: bool = False

    def shapes(self) -> tuple[dict, jax.ShapeDtypeStruct]:
        """Parameters, each layer's stacked along the first axis, and the int32 tokens."""
        width, head_dim = self.width, self.width // self.heads
        keys = self.kv_heads * head_dim
        if self.layer == "gpt":
            weights = {"qkv": (width, 3 * width), "out": (width, width)}
            weights |= {"wi": (width, self.hidden), "wo": (self.hidden, width)}
        else:
            weights = {"q": (width, width), "k": (width, keys), "v": (width, keys), "out": (width, width)}
            weights |= {"wi_0": (width, self.hidden), "wi_1": (width, self.hidden), "wo": (self.hidden, width)}
        weights |= {"norm_attention": (width,), "norm_mlp": (width,)}
        stacked = {name: self._array(self.layers, *shape) for name, shape in weights.items()}
        params = {"layers": stacked, "embed": self._array(self.vocabulary, width)}
        if not self.tied:
            params["unembed"] = self._array(width, self.vocabulary)
        return params, jax.ShapeDtypeStruct((self.batch, self.time), jnp.int32)

    def _array(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def block(self) -> Callable:
        """One layer: (x `(batch, time, width)`, its weights) → x."""
        return functools.partial({"gpt": gpt_layer, "llama": llama_layer}[self.layer], self)

    def loss(self, wrap: Callable[[Callable], Callable] = lambda block: block, *, scan: bool = True) -> Callable:
        """(params, tokens) → scalar float32; `wrap` puts rematerialisation round a layer."""
        block = wrap(self.block())

        def loss(params, tokens):
            x = params["embed"][tokens]
            if scan:
                x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), x, params["layers"])
            else:
                for i in range(self.layers):
                    x = block(x, jax.tree.map(lambda stacked: stacked[i], params["layers"]))  # noqa: B023  used at once
            unembed = params["embed"].T if self.tied else params["unembed"]
            scores = jax.nn.log_softmax((x @ unembed).astype(jnp.float32))
            return -jnp.take_along_axis(scores, tokens[..., None], -1).mean()

        return loss


def checkpointed(policy: Policy, *, prevent_cse: bool = True) -> Callable[[Callable], Callable]:
    """A `wrap` for `Stack.loss`: `jax.checkpoint` of each layer with one of JAX's own policies."""
    return functools.partial(jax.checkpoint, policy=policy, prevent_cse=prevent_cse)


def rms_norm(x, scale):
    """In float32, scaled in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def attention(query, key, value):
    """Plain causal attention, softmax in float32; all are `(batch, time, heads, head_dim)`."""
    batch, time, _, head_dim = query.shape
    scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / head_dim**0.5
    scores = jnp.where(jnp.tri(time, dtype=bool), scores.astype(jnp.float32), -1e30)
    context = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores).astype(value.dtype), value)
    return context.reshape(batch, time, -1)


def rotate(x, theta: float = 10_000.0):
    """Rotary positions on `(batch, time, heads, head_dim)`, in float32."""
    time, half = x.shape[1], x.shape[-1] // 2
    angle = (jnp.arange(time)[:, None] * theta ** (-jnp.arange(half) / half))[:, None]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = (a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle))
    return jnp.concatenate(turned, axis=-1).astype(x.dtype)


def gpt_layer(stack: Stack, x, weights):
    """Pre-norm, fused qkv, GELU."""
    batch, time, width = x.shape
    h = rms_norm(x, weights["norm_attention"])
    qkv = checkpoint_name(h @ weights["qkv"], "qkv_proj").reshape(batch, time, 3, stack.heads, width // stack.heads)
    context = checkpoint_name(attention(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]), "context")
    x = x + checkpoint_name(context @ weights["out"], "out_proj")
    h = checkpoint_name(rms_norm(x, weights["norm_mlp"]) @ weights["wi"], "mlpwi")
    return x + checkpoint_name(jax.nn.gelu(h) @ weights["wo"], "mlpwo")


def llama_layer(stack: Stack, x, weights):
    """Pre-norm, rotary positions, grouped queries, SwiGLU."""
    batch, time, width = x.shape
    h = rms_norm(x, weights["norm_attention"])
    query, key, value = ((h @ weights[name]).reshape(batch, time, -1, width // stack.heads) for name in "qkv")
    query, key = checkpoint_name(rotate(query), "query_proj"), checkpoint_name(rotate(key), "key_proj")
    value = checkpoint_name(value, "value_proj")
    # Each key and value head serves a group of query heads.
    key, value = (jnp.repeat(x, stack.heads // stack.kv_heads, axis=2) for x in (key, value))
    context = checkpoint_name(attention(query, key, value), "context")
    x = x + checkpoint_name(context @ weights["out"], "out_proj")
    h = rms_norm(x, weights["norm_mlp"])
    gate, up = (checkpoint_name(h @ weights[f"wi_{i}"], f"mlpwi_{i}") for i in (0, 1))
    return x + checkpoint_name((jax.nn.silu(gate) * up) @ weights["wo"], "mlpwo")


_LARGE = {"width": 1024, "heads": 16, "vocabulary": 32_000, "layers": 12, "dtype": "bfloat16"}
# Vocabulary, hidden width and groups of the Llama are those whose products give the published shares of recomputation.
STACKS = {
    "gpt": Stack(layer="gpt", batch=8, time=1024, kv_heads=16, hidden=4096, **_LARGE),
    "llama": Stack(layer="llama", batch=4, time=2048, kv_heads=4, hidden=2816, **_LARGE),
    "small": Stack(
        layer="gpt", batch=4, time=512, width=256, heads=8, kv_heads=8, hidden=1024, vocabulary=1024, layers=8,
        dtype="float32", tied=True,
    ),
}  # fmt: skip
