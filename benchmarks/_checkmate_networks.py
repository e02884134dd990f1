"""The networks of `benchmarks._checkmate_models` as JAX functions, for a compiler to say what they need."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from benchmarks._checkmate_models import Layer, Layers

_LAYOUT = ("NHWC", "HWIO", "NHWC")


def network(net: Layers, batch: int) -> tuple[Callable, tuple]:
    """`loss(params, images)`, and the shapes of its arguments, float32.

    Each part of the network runs in a scope of its own, as modules do. A convolution or dense layer that no
    normalisation follows has its rectifier, but for the last; normalisation is over the batch.
    """
    shapes = [_shapes(net, layer, i) for i, layer in enumerate(net.layers)]
    images = (batch, *net.shape[None])
    rectified = _rectified(net)

    def loss(params, images):
        values = {None: images}
        for i, (layer, given) in enumerate(zip(net.layers, params, strict=True)):
            with jax.named_scope(f"Block_{layer.block}"):
                made = _RUN[layer.kind](given, *(values[at] for at in layer.reads), **_options(net, layer, i))
                values[i] = jax.nn.relu(made) if i in rectified else made
        return jnp.mean(values[len(net.layers) - 1] ** 2)

    array = lambda shape: jax.ShapeDtypeStruct(shape, "float32")  # noqa: E731
    return loss, ([{name: array(shape) for name, shape in each.items()} for each in shapes], array(images))


def _rectified(net: Layers) -> set[int]:
    normalised = {at for layer in net.layers if layer.kind == "norm" for at in layer.reads}
    products = [i for i, layer in enumerate(net.layers) if layer.kind in ("conv", "dense")]
    return set(products[:-1]) - normalised


def _shapes(net: Layers, layer: Layer, at: int) -> dict[str, tuple[int, ...]]:
    channels, (incoming, *_) = net.shape[at][-1], [net.shape[i][-1] for i in layer.reads]
    if layer.kind == "conv":
        kernel = layer.options["kernel"]
        found = {"kernel": (kernel, kernel, incoming, channels)}
        return found | ({"bias": (channels,)} if layer.options["bias"] else {})
    if layer.kind == "depthwise":
        return {"kernel": (3, 3, 1, channels)}
    if layer.kind == "norm":
        return {"scale": (channels,), "bias": (channels,)}
    return {"kernel": (incoming, channels), "bias": (channels,)} if layer.kind == "dense" else {}


def _options(net: Layers, layer: Layer, at: int) -> dict:
    if layer.kind == "reshape":
        return {"shape": net.shape[at]}
    return {name: value for name, value in layer.options.items() if name not in ("kernel", "bias")}


def _conv(given, x, *, stride: int, same: bool):
    kernel = given["kernel"]
    groups = x.shape[-1] // kernel.shape[2]
    out = jax.lax.conv_general_dilated(
        x,
        kernel,
        (stride, stride),
        "SAME" if same else "VALID",
        dimension_numbers=_LAYOUT,
        feature_group_count=groups,
    )
    return out + given["bias"] if "bias" in given else out


def _norm(given, x):
    axes = tuple(range(x.ndim - 1))
    h = (x - x.mean(axes)) * jax.lax.rsqrt(x.var(axes) + 1e-5)
    return h * given["scale"] + given["bias"]


def _pad(given, x, *, extra: int):
    return jnp.pad(x, ((0, 0), *(((extra // 2), extra - extra // 2),) * 2, (0, 0)))


def _pool(given, x, *, size: int, stride: int):
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, size, size, 1), (1, stride, stride, 1), "VALID")


_RUN = {
    "conv": _conv,
    "depthwise": _conv,
    "norm": _norm,
    "relu": lambda given, x: jax.nn.relu(x),
    "pad": _pad,
    "pool": _pool,
    "mean": lambda given, x: x.mean((1, 2)),
    "reshape": lambda given, x, shape: x.reshape(len(x), *shape),
    "dense": lambda given, x: x @ given["kernel"] + given["bias"],
    "sum": lambda given, *xs: functools.reduce(jnp.add, xs),
    "grow": lambda given, x: x.repeat(2, 1).repeat(2, 2),
    "join": lambda given, *xs: jnp.concatenate(xs, -1),
}
