"""Four stacks under scan for loose budgets, each slow elsewhere, small enough to compile for a TPU in seconds."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from benchmarks._stacks import Stack, rms_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadsFirst(Stack):
    """A GPT whose attention is computed with the heads moved before the positions, and whose embedding is tied."""

    def block(self) -> Callable:
        def block(x, weights):
            batch, time, width = x.shape

            def heads(t):
                return t.reshape(batch, time, self.heads, -1).transpose(0, 2, 1, 3)

            qkv = checkpoint_name(rms_norm(x, weights["norm_attention"]) @ weights["qkv"], "qkv_proj")
            query, key, value = map(heads, jnp.split(qkv, 3, -1))
            scores = jnp.einsum("bhqd,bhkd->bhqk", query, key).astype(jnp.float32) * (width // self.heads) ** -0.5
            scores = jnp.where(jnp.tri(time, dtype=bool), scores, -1e9)
            weighted = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores).astype(x.dtype), value)
            context = checkpoint_name(weighted, "context").transpose(0, 2, 1, 3).reshape(x.shape)
            x = x + checkpoint_name(context @ weights["out"], "out_proj")
            h = checkpoint_name(rms_norm(x, weights["norm_mlp"]) @ weights["wi"], "mlpwi")
            return x + checkpoint_name(jax.nn.gelu(h) @ weights["wo"], "mlpwo")

        return block


@dataclasses.dataclass(frozen=True, kw_only=True)
class WideMlp:
    """Residual layers of a gated product, `width` to `hidden` and back, on rows `(rows, width)`."""

    rows: int
    width: int
    hidden: int
    layers: int
    dtype: str = "bfloat16"

    def shapes(self) -> tuple[dict, jax.ShapeDtypeStruct]:
        sizes = {"norm": (self.width,), "wi": (self.width, self.hidden), "wo": (self.hidden, self.width)}
        params = {name: jax.ShapeDtypeStruct((self.layers, *size), self.dtype) for name, size in sizes.items()}
        return params, jax.ShapeDtypeStruct((self.rows, self.width), self.dtype)

    def block(self) -> Callable:
        def block(x, weights):
            h = checkpoint_name(rms_norm(x, weights["norm"]) @ weights["wi"], "mlpwi")
            return x + checkpoint_name(jax.nn.gelu(h) @ weights["wo"], "mlpwo")

        return block

    def loss(self, wrap: Callable[[Callable], Callable] = lambda block: block) -> Callable:
        block = wrap(self.block())

        def loss(params, data):
            x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), data, params)
            return (x.astype(jnp.float32) ** 2).mean()

        return loss


LOOSE = {
    "gpt": HeadsFirst(
        layer="gpt", batch=8, time=1024, width=768, heads=12, kv_heads=12, hidden=3072, vocabulary=32_000, layers=8,
        dtype="bfloat16", tied=True,
    ),
    "llama": Stack(
        layer="llama", batch=16, time=512, width=512, heads=4, kv_heads=2, hidden=1408, vocabulary=512, layers=6,
        dtype="bfloat16",
    ),
    "mlp": WideMlp(rows=16_384, width=1024, hidden=8192, layers=6),
    "heads64": Stack(
        layer="gpt", batch=8, time=1024, width=512, heads=8, kv_heads=8, hidden=2048, vocabulary=512, layers=6,
        dtype="bfloat16",
    ),
}  # fmt: skip
