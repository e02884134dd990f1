"""The models of `benchmarks.order_and_roll`: training problems of shapes only, whose activations fill the memory.

Layers that a user unrolls have parameters of their own; a scan's are stacked. Models come with the loss that a user
writes with `jax.checkpoint` round each layer.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from benchmarks import _by_hand
from benchmarks._by_hand import ByHand
from benchmarks._real_models import label_loss, next_token_loss
from benchmarks._stacks import STACKS, Stack, attention, checkpointed, rms_norm
from benchmarks._vit_stack import VIT
from examples import deep_mlp, gpt, llama, resnet_batchnorm, vit_nnx
from jaxmem import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A training problem and what can be done to its step.

    Args:
      make: the workload; nothing is allocated.
      unrolled: whether repeated layers are unrolled, so that they may be rolled.
      draws: whether it draws masks.
      precision: as in `MemoryConfig`.
      by_hand: the loss with each layer under `jax.checkpoint`, as it is written by hand.
    """

    make: Callable[[], Workload]
    unrolled: bool = False
    draws: bool = False
    precision: str = "float32"
    by_hand: ByHand | None = None


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


# -- stacks of the other benchmarks ----------------------------------------------------------------

_GPT = dataclasses.replace(STACKS["gpt"], layers=6)
_LLAMA = dataclasses.replace(STACKS["llama"], layers=6, batch=2)
_VIT = dataclasses.replace(VIT, layers=6)
# Within a scan nothing merges a recomputation with its original, so it needs no barrier.
_scanned = checkpointed(None, prevent_cse=False)


def of_stack(stack: Any) -> Model:
    """A stack of layers under a scan, in bfloat16."""
    by_hand = _by_hand.plain(lambda params, batch, rng: stack.loss(_scanned)(params, batch))
    return Model(make=lambda: Workload(stack.loss(), *stack.shapes(), optax.sgd(0.1)), by_hand=by_hand)


def unrolled(stack: Stack) -> Model:
    """A stack whose layers are unrolled, with parameters of their own."""

    def loss_of(wrap: Callable[[Callable], Callable]):
        block = wrap(stack.block())

        def loss(params, tokens):
            x = params["embed"][tokens]
            for weights in params["layers"]:
                x = block(x, weights)
            return next_token_loss(x @ params["unembed"], tokens)

        return loss

    def make():
        params, tokens = stack.shapes()
        one = jax.tree.map(lambda leaf: shape(*leaf.shape[1:], dtype=leaf.dtype), params["layers"])
        return Workload(
            loss_of(lambda block: block), {**params, "layers": [one] * stack.layers}, tokens, optax.sgd(0.1)
        )

    by_hand = _by_hand.plain(lambda params, batch, rng: loss_of(jax.checkpoint)(params, batch))
    return Model(make=make, unrolled=True, by_hand=by_hand)


# -- a GPT whose embedding is its output layer -------------------------------------------------------

_TIED = dataclasses.replace(STACKS["gpt"], tied=True)


def _split_heads_block(x, w):
    """Pre-norm, fused qkv, GELU; `(batch, time, width)`."""
    qkv = (rms_norm(x, w["norm1"]) @ w["qkv"]).reshape(*x.shape[:2], 3 * _TIED.heads, -1)
    x = x + attention(*jnp.split(qkv, 3, axis=2)) @ w["out"]
    return x + jax.nn.gelu(rms_norm(x, w["norm2"]) @ w["up"]) @ w["down"]


def shared_embedding(wrap: Callable[[Callable], Callable] = lambda block: block):
    """The loss of a GPT under a scan: its head's gradient joins that of the embedding at the very end."""
    block = wrap(_split_heads_block)

    def loss(params, tokens):
        x, _ = jax.lax.scan(lambda x, w: (block(x, w), None), params["embed"][tokens], params["blocks"])
        logits = (rms_norm(x, params["norm"]) @ params["embed"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()

    return loss


def _shared_embedding_workload(layers: int) -> Workload:
    width, bf16 = _TIED.width, jnp.bfloat16
    sizes = {"norm1": (width,), "norm2": (width,), "qkv": (width, 3 * width), "out": (width, width)}
    sizes |= {"up": (width, 4 * width), "down": (4 * width, width)}
    blocks = {name: shape(layers, *size, dtype=bf16) for name, size in sizes.items()}
    embed = shape(_TIED.vocabulary, width, dtype=bf16)
    params = {"embed": embed, "norm": shape(width, dtype=bf16), "blocks": blocks}
    return Workload(shared_embedding(), params, shape(_TIED.batch, _TIED.time, dtype=jnp.int32), optax.sgd(0.1))


# -- residual MLPs with batch norm, biases and dropout ------------------------------------------------

_ROWS, _TIME, _WIDTH, _LAYERS = 1024, 32, 1024, 8


def _mlp_block(x, w, key):
    mean = x.mean((0, 1))
    h = (x - mean) * jax.lax.rsqrt(((x - mean) ** 2).mean((0, 1)) + 1e-5) * w["gain"]
    h = jax.nn.gelu(h @ w["up"] + w["up_bias"]) @ w["down"] + w["down_bias"]
    return x + jnp.where(jax.random.bernoulli(key, 0.9, h.shape), h / 0.9, 0)


def mlp(wrap: Callable[[Callable], Callable] = lambda block: block):
    """The loss `(params, batch, rng)` of unrolled layers in plain JAX."""
    block = wrap(_mlp_block)

    def loss(params, batch, *, rng):
        x = batch
        for i, w in enumerate(params):
            x = block(x, w, jax.random.fold_in(rng, i))
        logits = x.mean(1) @ jnp.ones((_WIDTH, 10))
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.zeros(_ROWS, jnp.int32)).mean()

    return loss


def _mlp_workload() -> Workload:
    layer = {"gain": (_WIDTH,), "up": (_WIDTH, 4 * _WIDTH), "up_bias": (4 * _WIDTH,)}
    layer |= {"down": (4 * _WIDTH, _WIDTH), "down_bias": (_WIDTH,)}
    params = [{name: shape(*size) for name, size in layer.items()} for _ in range(_LAYERS)]
    return Workload(mlp(), params, shape(_ROWS, _TIME, _WIDTH), optax.adamw(1e-3), rng=jax.random.key(0))


class _NnxBlock(nnx.Module):
    """The same layer of flax's parts; half as many compile sooner."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.BatchNorm(_WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(_WIDTH, 4 * _WIDTH, rngs=rngs), nnx.Linear(4 * _WIDTH, _WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norm(x)))))


class _NnxMlp(nnx.Module):
    def __init__(self, rngs: nnx.Rngs, wrap: Callable = lambda block: block):
        self.wrap = wrap
        self.blocks = nnx.List([_NnxBlock(rngs) for _ in range(_LAYERS // 2)])
        self.head = nnx.Linear(_WIDTH, 10, rngs=rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = self.wrap(block)(x)
        return self.head(x.mean(1))


def _nnx_mlp_loss(model, batch):
    return label_loss(model(batch["x"]), batch["y"])


def _nnx_mlp_workload() -> Workload:
    batch = {"x": shape(_ROWS, _TIME, _WIDTH), "y": shape(_ROWS, dtype=jnp.int32)}
    make = lambda key: _NnxMlp(nnx.Rngs(key))  # noqa: E731
    return Workload.from_nnx(make, _nnx_mlp_loss, batch, optax.adamw(1e-3), rng=jax.random.key(0))


# -- examples, some with fewer layers -----------------------------------------------------------------


class _UnrolledGPT(nn.Module):
    """The layers of examples/gpt.py in a Python loop: biases, dropout, computed in bfloat16."""

    wrap: Callable = lambda block: block

    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(32_000, 768, dtype=jnp.bfloat16, name="embed")
        x, block = embed(tokens), self.wrap(gpt.Block)
        for i in range(4):
            x, _ = block(12, 4, 0.1, True, jnp.bfloat16, name=f"block_{i}")(x)
        return embed.attend(nn.LayerNorm(dtype=jnp.bfloat16, name="norm")(x))


def _unrolled_gpt_loss(model, tokens):
    return next_token_loss(model(tokens), tokens)


def _unrolled_gpt_workload() -> Workload:
    tokens = shape(8, 1024, dtype=jnp.int32)
    return Workload.from_linen(_UnrolledGPT(), _unrolled_gpt_loss, tokens, optax.adamw(1e-3), rng=jax.random.key(0))


def _gpt2(memory) -> nn.Module:
    return gpt.GPT(50257, 1024, 12, 768, 12, 0.1, memory)  # as gpt.gpt2_124m


def _short_llama(memory) -> nn.Module:
    return llama.Llama(128_256, 4, 1024, 16, 8, 2816, 500_000.0, memory)  # as llama.abstract


def _vit(key) -> nnx.Module:
    sizes = {"side": 224, "patch": 16, "channels": 3, "classes": 1000, "layers": 4, "width": 768, "heads": 12}
    return vit_nnx.ViT(**sizes, dropout=0.1, rngs=nnx.Rngs(key))


def _short_vit() -> Workload:
    batch = {"image": shape(64, 224, 224, 3), "label": shape(64, dtype=jnp.int32)}
    return Workload.from_nnx(_vit, vit_nnx.loss_fn, batch, optax.adamw(1e-3), rng=jax.random.key(0))


def _resnet(memory) -> nn.Module:
    """Two stages of ResNet-50, of three and four blocks."""
    return resnet_batchnorm.ResNet(1000, (3, 4), 64, big_images=True, memory=memory)


def _short_resnet() -> Workload:
    batch = {"image": shape(32, 224, 224, 3), "label": shape(32, dtype=jnp.int32)}
    return Workload.from_linen(_resnet, resnet_batchnorm.loss_fn, batch, optax.sgd(0.1, momentum=0.9))


def _deep_mlp(params, batch, rng):
    x, _ = jax.lax.scan(_scanned(deep_mlp.layer), batch["image"] @ params["in"], params["layers"])
    return optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], batch["label"]).mean()


MODELS = {
    "gpt": of_stack(_GPT),
    "llama": of_stack(_LLAMA),
    "vit": of_stack(_VIT),
    "gpt_shared": Model(
        make=lambda: _shared_embedding_workload(12),
        by_hand=_by_hand.plain(lambda params, batch, rng: shared_embedding(_scanned)(params, batch)),
    ),
    "gpt_unrolled": unrolled(dataclasses.replace(_GPT, layers=4)),
    "llama_unrolled": unrolled(dataclasses.replace(_LLAMA, layers=4)),
    "mlp": Model(
        make=_mlp_workload,
        unrolled=True,
        draws=True,
        by_hand=_by_hand.plain(lambda params, batch, rng: mlp(jax.checkpoint)(params, batch, rng=rng)),
    ),
    "mlp_nnx": Model(
        make=_nnx_mlp_workload,
        unrolled=True,
        draws=True,
        by_hand=_by_hand.nnx_model(lambda key: _NnxMlp(nnx.Rngs(key), _by_hand.rematted), _nnx_mlp_loss),
    ),
    "gpt_linen": Model(
        make=_unrolled_gpt_workload,
        unrolled=True,
        draws=True,
        by_hand=_by_hand.linen(lambda memory: _UnrolledGPT(wrap=nn.remat), _unrolled_gpt_loss),
    ),
    "examples_gpt2": Model(
        make=gpt.gpt2_124m, draws=True, precision="bfloat16", by_hand=_by_hand.linen(_gpt2, gpt.loss_fn)
    ),
    "examples_llama": Model(
        make=lambda: llama.abstract(2, 2048, 4, width=1024, heads=16, hidden=2816),
        precision="bfloat16",
        by_hand=_by_hand.linen(_short_llama, llama.loss_fn),
    ),
    "examples_vit": Model(
        make=_short_vit,
        unrolled=True,
        draws=True,
        precision="bfloat16",
        by_hand=_by_hand.nnx_model(_vit, _by_hand.with_memory(vit_nnx.loss_fn)),
    ),
    "examples_resnet": Model(
        make=_short_resnet,
        unrolled=True,
        precision="bfloat16",
        by_hand=_by_hand.linen(_resnet, resnet_batchnorm.loss_fn),
    ),
    "examples_deep_mlp": Model(make=lambda: deep_mlp.wide(every=0), by_hand=_by_hand.plain(_deep_mlp)),
}
"""By name; those of the examples begin with "examples_"."""
