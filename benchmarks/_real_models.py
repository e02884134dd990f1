"""Small models of other authors' packages, with random weights.

Each entry makes a loss of parameters and a batch; what is no array, such as Haiku's transformed function, is closed
over. The package is imported when the model is made.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """A model to try.

    Args:
      package: what has to be installed, by its name on the registry.
      kind: the library that it is written in.
      what: the model, in a few words.
      make: returns the loss, a function `(params, *batch) → scalar`, the parameters and the batch; or another form.
    """

    package: str
    kind: str
    what: str
    make: Callable[[], Any]


def tokens(batch: int, time: int, vocabulary: int) -> jax.Array:
    """Random tokens."""
    return jnp.asarray(np.random.default_rng(0).integers(0, vocabulary, (batch, time)), jnp.int32)


def images(batch: int, side: int) -> jax.Array:
    """Random images `(batch, side, side, 3)`."""
    return jnp.asarray(np.random.default_rng(0).standard_normal((batch, side, side, 3), np.float32))


def next_token_loss(logits, ids) -> jax.Array:
    """Cross-entropy of each token given those before it; logits `(batch, time, vocabulary)`."""
    scores = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
    return -jnp.take_along_axis(scores, ids[:, 1:, None], -1).mean()


def label_loss(logits, labels) -> jax.Array:
    """Cross-entropy; logits `(batch, classes)`."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], -1).mean()


LABELS = jnp.arange(8) % 10


def transformers_gpt2():
    from transformers import FlaxGPT2LMHeadModel, GPT2Config

    config = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=4, n_head=4)
    model = FlaxGPT2LMHeadModel(config, input_shape=(1, 8))

    def loss(params, ids, key):
        return next_token_loss(model(ids, params=params, dropout_rng=key, train=True).logits, ids)

    return loss, model.params, (tokens(4, 64, 256), jax.random.key(0))


def transformers_bart():
    from transformers import BartConfig, FlaxBartForConditionalGeneration

    layers = {f"{half}_{what}": n for half in ("encoder", "decoder") for what, n in (("layers", 2), ("ffn_dim", 128))}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    config = BartConfig(vocab_size=256, max_position_embeddings=64, d_model=64, **layers, **heads)
    model = FlaxBartForConditionalGeneration(config, input_shape=(1, 8))

    def loss(params, ids, key):
        out = model(ids, decoder_input_ids=ids, params=params, dropout_rng=key, train=True)
        return next_token_loss(out.logits, ids)

    return loss, model.params, (tokens(4, 48, 256), jax.random.key(0))


def flaxmodels_resnet():
    import flaxmodels

    model = flaxmodels.ResNet18(output="logits", pretrained=None, num_classes=10)
    variables = model.init(jax.random.key(0), images(1, 64))

    def loss(params, stats, x, labels):
        logits, _ = model.apply({"params": params, "batch_stats": stats}, x, train=True, mutable=["batch_stats"])
        return label_loss(logits, labels)

    return loss, variables["params"], (variables["batch_stats"], images(8, 64), LABELS)


def haiku_resnet():
    import haiku as hk

    net = hk.transform_with_state(lambda x: hk.nets.ResNet50(10)(x, is_training=True))
    params, state = net.init(jax.random.key(0), images(2, 64))

    def loss(params, state, x, labels):
        logits, _ = net.apply(params, state, None, x)
        return label_loss(logits, labels)

    return loss, params, (state, images(8, 64), LABELS)


def haiku_lstm():
    import haiku as hk

    def run(ids):
        core = hk.DeepRNN([hk.LSTM(64), hk.LSTM(64)])
        out, _ = hk.dynamic_unroll(core, hk.Embed(64, 64)(ids), core.initial_state(len(ids)), time_major=False)
        return hk.Linear(64)(out)

    net = hk.without_apply_rng(hk.transform(run))
    ids = tokens(4, 48, 64)
    return (lambda params, ids: next_token_loss(net.apply(params, ids), ids)), net.init(jax.random.key(0), ids), (ids,)


def mamba2():
    from flax import nnx
    from mamba2_jax import Mamba2Config, Mamba2ForCausalLM

    config = dataclasses.replace(Mamba2Config.tiny(), num_hidden_layers=4)
    graph, params, rest = nnx.split(Mamba2ForCausalLM(config, rngs=nnx.Rngs(0)), nnx.Param, ...)

    def loss(params, rest, ids):
        return nnx.merge(graph, params, rest)(ids, labels=ids)["loss"]

    return loss, params, (rest, tokens(2, 64, 1000))


def griffin():
    from recurrentgemma import common
    from recurrentgemma.jax import Griffin

    recurrent, attention = common.TemporalBlockType.RECURRENT, common.TemporalBlockType.ATTENTION
    config = common.GriffinConfig(
        vocab_size=256,
        width=64,
        mlp_expanded_width=128,
        num_heads=4,
        block_types=(recurrent, recurrent, attention),
        embeddings_scale_by_sqrt_dim=True,
        attention_window_size=32,
        logits_soft_cap=30.0,
        scan_type=common.ScanType.LINEAR_NATIVE,
    )
    model = Griffin(config, gradient_checkpointing=False)
    ids = tokens(2, 48, 256)
    positions = jnp.broadcast_to(jnp.arange(48), ids.shape)

    def loss(params, ids, positions):
        return next_token_loss(model.apply(params, ids, positions, return_cache=False)[0], ids)

    return loss, model.init(jax.random.key(0), ids, positions), (ids, positions)


def palm():
    from palm_jax import PaLM

    model = PaLM(num_tokens=256, dim=64, dim_head=16, depth=4, heads=4, key=jax.random.key(0))
    ids = tokens(4, 48, 256)
    return (lambda model, ids: next_token_loss(jax.vmap(model)(ids), ids)), model, (ids,)


def equimo_model(made) -> tuple[Callable, Any, tuple]:
    """An Equinox model of single images `(channels, height, width)`."""
    import equinox as eqx

    params, rest = eqx.partition(made, eqx.is_inexact_array)

    def loss(params, x, labels, keys):
        model = eqx.combine(params, rest)
        return label_loss(jax.vmap(lambda x, key: model(x, key=key))(x, keys), labels)

    x = images(8, 64).transpose(0, 3, 1, 2)
    return loss, params, (x, LABELS, jax.random.split(jax.random.key(1), 8))


def equimo_vit():
    from equimo.models import VisionTransformer

    key = jax.random.key(0)
    options = {"dim": 64, "patch_size": 8, "num_heads": [4], "depths": [6], "num_classes": 10}
    return equimo_model(VisionTransformer(img_size=64, in_channels=3, key=key, **options))


def equimo_convnext():
    from equimo.models import ConvNeXt

    options = {"depths": [2, 2, 4, 2], "dims": [16, 32, 64, 128], "drop_path_rate": 0.1, "num_classes": 10}
    return equimo_model(ConvNeXt(in_channels=3, key=jax.random.key(0), **options))


MODELS = {
    "GPT-2": Model(package="transformers", kind="linen", what="4 layers, dropout", make=transformers_gpt2),
    "BART": Model(package="transformers", kind="linen", what="encoder and decoder, dropout", make=transformers_bart),
    "ResNet-18": Model(package="flaxmodels", kind="linen", what="batch norm", make=flaxmodels_resnet),
    "Griffin": Model(package="recurrentgemma", kind="linen", what="RG-LRU and local attention", make=griffin),
    "Mamba-2": Model(package="mamba2-jax", kind="nnx", what="4 layers, state space", make=mamba2),
    "ResNet-50": Model(package="dm-haiku", kind="Haiku", what="batch norm", make=haiku_resnet),
    "LSTM": Model(package="dm-haiku", kind="Haiku", what="2 layers over 48 steps", make=haiku_lstm),
    "PaLM": Model(package="PaLM-jax", kind="Equinox", what="4 layers under vmap", make=palm),
    "ViT": Model(package="equimo", kind="Equinox", what="6 layers under vmap", make=equimo_vit),
    "ConvNeXt": Model(package="equimo", kind="Equinox", what="stochastic depth", make=equimo_convnext),
}
