"""The GPT block of `benchmarks._torch_block` in plain JAX, operation by operation."""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a stack of blocks; all arrays are float32."""

    layers: int
    batch: int = 4
    time: int = 256
    width: int = 256
    heads: int = 4

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one block's weights."""
        width = self.width
        norms = dict.fromkeys(("norm_1", "bias_1", "norm_2", "bias_2"), (width,))
        return norms | {
            "qkv": (width, 3 * width),
            "out": (width, width),
            "wi": (width, 4 * width),
            "wo": (4 * width, width),
        }

    @property
    def x(self) -> tuple[int, int, int]:
        """Shape of the input."""
        return self.batch, self.time, self.width

    def abstract(self) -> tuple[list[dict], jax.ShapeDtypeStruct]:
        """Arguments of `stack` but for `heads`."""
        array = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
        return [{name: array(shape) for name, shape in self.weights.items()}] * self.layers, array(self.x)


def stack(weights: list[dict], x, heads: int):
    """The blocks in a row, written out; x `(batch, time, width)`."""
    for each in weights:
        x = block(each, x, heads)
    return x


def block(weights: dict, x, heads: int):
    """Pre-norm, fused qkv, causal attention as products, GELU."""
    batch, time, width = x.shape
    h = layer_norm(x, weights["norm_1"], weights["bias_1"])
    qkv = (h @ weights["qkv"]).reshape(batch, time, 3, heads, width // heads)
    query, key, value = (qkv[:, :, i].swapaxes(1, 2) for i in range(3))
    scores = query @ key.swapaxes(-1, -2) / (width // heads) ** 0.5
    scores = jnp.where(jnp.tri(time, dtype=bool), scores, -1e30)
    context = (jax.nn.softmax(scores) @ value).swapaxes(1, 2).reshape(batch, time, width)
    x = x + context @ weights["out"]
    h = layer_norm(x, weights["norm_2"], weights["bias_2"])
    return x + jax.nn.gelu(h @ weights["wi"], approximate=False) @ weights["wo"]


def layer_norm(x, scale, bias):
    """Over the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    return centred * jax.lax.rsqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * scale + bias
