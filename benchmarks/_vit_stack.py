"""A vision transformer's layers on patches of images, beside the decoders of `benchmarks._stacks`."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class VitStack:
    """Equal encoder layers on images `(batch, side, side, 3)`, mean-pooled, with softmax cross-entropy.

    Names are where MaxText has them in a decoder. The largest of ViT's published sizes have more layers; under a scan
    these add bytes, and nothing to compile.

    Args:
      patch: its side; `(side / patch) ** 2` tokens.
      hidden: width of the MLP.
    """

    batch: int
    side: int = 224
    patch: int = 14
    width: int = 1024
    heads: int = 16
    hidden: int = 4096
    classes: int = 1000
    layers: int = 12
    dtype: str = "bfloat16"

    def shapes(self) -> tuple[dict, dict]:
        """Parameters, each layer's stacked along the first axis; images in the parameters' dtype and int32 labels."""
        width, tokens = self.width, (self.side // self.patch) ** 2
        weights = {"qkv": (width, 3 * width), "out": (width, width), "wi": (width, self.hidden)}
        weights |= {"wo": (self.hidden, width), "qkv_bias": (3 * width,), "out_bias": (width,)}
        weights |= {"wi_bias": (self.hidden,), "wo_bias": (width,)}
        weights |= {f"{norm}_{what}": (width,) for norm in ("attention", "mlp") for what in ("scale", "bias")}
        params = {
            "layers": {name: self._array(self.layers, *shape) for name, shape in weights.items()},
            "embed": self._array(self.patch * self.patch * 3, width),
            "positions": self._array(tokens, width),
            "head": self._array(width, self.classes),
        }
        images = self._array(self.batch, self.side, self.side, 3)
        return params, {"image": images, "label": jax.ShapeDtypeStruct((self.batch,), jnp.int32)}

    def _array(self, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def loss(self, wrap: Callable[[Callable], Callable] = lambda block: block, *, scan: bool = True) -> Callable:
        """(params, batch) → scalar float32; `wrap` puts rematerialisation round a layer."""
        block = wrap(self.layer)

        def loss(params, batch):
            x = self.patches(batch["image"]) @ params["embed"] + params["positions"]
            if scan:
                x, _ = jax.lax.scan(lambda x, weights: (block(x, weights), None), x, params["layers"])
            else:
                for i in range(self.layers):
                    x = block(x, jax.tree.map(lambda stacked: stacked[i], params["layers"]))  # noqa: B023  used at once
            scores = jax.nn.log_softmax((x.mean(1) @ params["head"]).astype(jnp.float32))
            return -jnp.take_along_axis(scores, batch["label"][:, None], -1).mean()

        return loss

    def patches(self, image):
        """`(batch, side, side, 3)` → `(batch, tokens, patch * patch * 3)`."""
        count, patch = self.side // self.patch, self.patch
        cut = image.reshape(-1, count, patch, count, patch, 3).swapaxes(2, 3)
        return cut.reshape(-1, count * count, patch * patch * 3)

    def layer(self, x, weights):
        """Pre-norm, fused qkv, GELU, with biases; `(batch, tokens, width)`."""
        batch, tokens, width = x.shape
        h = layer_norm(x, weights["attention_scale"], weights["attention_bias"])
        qkv = checkpoint_name(h @ weights["qkv"] + weights["qkv_bias"], "qkv_proj")
        query, key, value = jnp.moveaxis(qkv.reshape(batch, tokens, 3, self.heads, width // self.heads), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (width // self.heads) ** 0.5
        shares = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)
        context = checkpoint_name(jnp.einsum("bhqk,bkhd->bqhd", shares, value).reshape(x.shape), "context")
        x = x + checkpoint_name(context @ weights["out"] + weights["out_bias"], "out_proj")
        h = layer_norm(x, weights["mlp_scale"], weights["mlp_bias"])
        h = checkpoint_name(h @ weights["wi"] + weights["wi_bias"], "mlpwi")
        return x + checkpoint_name(jax.nn.gelu(h) @ weights["wo"] + weights["wo_bias"], "mlpwo")


def layer_norm(x, scale, bias):
    """In float32, scaled and shifted in the dtype of `x`."""
    x32 = x.astype(jnp.float32)
    x32 = x32 - x32.mean(-1, keepdims=True)
    return (x32 * jax.lax.rsqrt((x32 * x32).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype) * scale + bias


VIT = VitStack(batch=32)
