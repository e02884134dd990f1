"""A vision transformer in flax.nnx, on the 8×8 handwritten digits that scikit-learn carries with it.

    pip install scikit-learn
    python examples/vit_nnx.py                                            train, then test accuracy
    jaxmem compare examples/vit_nnx.py --remat none,full,dots             what each policy saves and costs
    jaxmem analyze examples/vit_nnx.py:vit_b16 --set batch=32             ViT-B/16 at 224², nothing allocated

Dropout draws from the model's own streams. Their counts are state of the step, so every micro-batch gets its own mask.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jaxmem

# ---------------------------------------------------------------- the model


class Block(nnx.Module):
    """One pre-norm transformer layer; `(batch, tokens, width) → (batch, tokens, width)`.

    The values have MaxText's names, so its remat presets apply: `--remat save_qkv_proj`.
    """

    def __init__(self, width: int, heads: int, dropout: float, rngs: nnx.Rngs):
        self.heads = heads
        self.norm_attention = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.qkv = nnx.Linear(width, 3 * width, rngs=rngs)
        self.attention_out = nnx.Linear(width, width, rngs=rngs)
        self.norm_mlp = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.mlp_in = nnx.Linear(width, 4 * width, rngs=rngs)
        self.mlp_out = nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        batch, tokens, width = x.shape
        qkv = checkpoint_name(self.qkv(self.norm_attention(x)), "qkv_proj")
        qkv = qkv.reshape(batch, tokens, 3 * self.heads, width // self.heads)
        query, key, value = jnp.split(qkv, 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (width // self.heads) ** 0.5
        weights = jax.nn.softmax(scores.astype(jnp.float32)).astype(x.dtype)  # softmax in float32
        context = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, tokens, width)
        context = checkpoint_name(context, "context")
        x = x + self.dropout(checkpoint_name(self.attention_out(context), "out_proj"))
        h = checkpoint_name(self.mlp_in(self.norm_mlp(x)), "mlpwi")  # the input of gelu, which is cheap to repeat
        return x + self.dropout(checkpoint_name(self.mlp_out(nnx.gelu(h)), "mlpwo"))


class ViT(nnx.Module):
    """Images `(batch, side, side, channels)` → float32 logits `(batch, classes)`; the defaults suit the digits."""

    def __init__(
        self,
        *,
        side: int = 8,
        patch: int = 2,
        channels: int = 1,
        classes: int = 10,
        layers: int = 4,
        width: int = 64,
        heads: int = 4,
        dropout: float = 0.1,
        rngs: nnx.Rngs,
    ):
        normal = nnx.initializers.normal(0.02)
        self.patches = nnx.Conv(channels, width, (patch, patch), strides=patch, padding="VALID", rngs=rngs)
        self.class_token = nnx.Param(normal(rngs.params(), (1, 1, width)))
        self.position = nnx.Param(normal(rngs.params(), (1, 1 + (side // patch) ** 2, width)))
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.blocks = nnx.List([Block(width, heads, dropout, rngs) for _ in range(layers)])
        self.norm_out = nnx.LayerNorm(width, epsilon=1e-6, rngs=rngs)
        self.head = nnx.Linear(width, classes, rngs=rngs)

    def __call__(self, images, memory: jaxmem.Memory):
        self.set_attributes(dtype=memory.compute_dtype)  # every layer computes in it; parameters stay float32
        x = self.patches(images)
        batch, _, _, width = x.shape
        token = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (batch, 1, width))
        x = jnp.concatenate([token, x.reshape(batch, -1, width)], axis=1) + self.position[...].astype(x.dtype)
        x = self.dropout(x)
        for block in self.blocks:
            x = memory.block(block)(x)  # under the configured remat
        return self.head(self.norm_out(x[:, 0])).astype(jnp.float32)


def loss_fn(model, batch, *, memory):
    """Nats per image; `batch` holds `image` as above and `label (batch,)`."""
    logits = model(batch["image"], memory)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hits = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
    return jaxmem.LossOutput(
        jaxmem.WeightedMean(nats.sum(), nats.size),
        metrics={"accuracy": jaxmem.WeightedMean(hits.sum(), hits.size)},
    )


# ---------------------------------------------------------------- the digits


def digits() -> tuple[dict, dict]:
    """1,437 images to train on and 360 to test on: `image (n, 8, 8, 1)` float32 in 0..1, `label (n,)` int32."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("The digits are scikit-learn's: pip install scikit-learn", name="sklearn") from error
    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    image = (bunch.images[order, :, :, None] / 16).astype(np.float32)
    label = bunch.target[order].astype(np.int32)
    return {"image": image[:1437], "label": label[:1437]}, {"image": image[1437:], "label": label[1437:]}


def random_rows(rows: dict, batch: int, seed: int = 0):
    """A function of the window index, so that a resumed run gets the same batches."""

    def data(window: int):
        rng = np.random.Generator(np.random.Philox(key=[seed, window]))
        chosen = rng.choice(len(rows["label"]), size=batch, replace=False)
        return {name: values[chosen] for name, values in rows.items()}

    return data


# ---------------------------------------------------------------- the presets


def workload(
    *,
    batch: int = 64,
    layers: int = 4,
    width: int = 64,
    heads: int = 4,
    dropout: float = 0.1,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> jaxmem.Workload:
    """`tiny`: the digits; about nine of ten test images correct after 200 steps."""
    data = random_rows(digits()[0], batch, seed)
    return jaxmem.Workload.from_nnx(
        lambda key: ViT(layers=layers, width=width, heads=heads, dropout=dropout, rngs=nnx.Rngs(key)),
        loss_fn,
        data(0),
        optax.adamw(optax.linear_schedule(0.0, learning_rate, 20)),
        rng=jax.random.key(seed),
        data=data,
    )


def vit_b16(*, batch: int = 64, dropout: float = 0.1) -> jaxmem.Workload:
    """ViT-B/16 at 224², 86,567,656 parameters; shapes only, nothing is allocated before `step.init`."""
    shape = {"side": 224, "patch": 16, "channels": 3, "classes": 1000, "layers": 12, "width": 768, "heads": 12}
    return jaxmem.Workload.from_nnx(
        lambda key: ViT(**shape, dropout=dropout, rngs=nnx.Rngs(key)),
        loss_fn,
        {
            "image": jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.float32),
            "label": jax.ShapeDtypeStruct((batch,), jnp.int32),
        },
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=0.3)),
        rng=jax.random.key(0),
    )


if __name__ == "__main__":
    tiny = workload()
    step = jaxmem.make_train_step(tiny, jaxmem.MemoryConfig(accumulation_steps=2, remat="full"))
    state = jaxmem.train_loop(
        step,
        step.init(),
        tiny.data,
        200,
        on_metrics=lambda m: print(f"step {m['step']:3d}  loss {m['loss']:.3f}  accuracy {m['accuracy']:.0%}"),
    )
    model = ViT(rngs=nnx.Rngs(0))
    step.update(model, state)  # the trained parameters, back in an ordinary nnx model
    model.eval()
    test = digits()[1]
    logits = model(test["image"], jaxmem.Memory())
    print(f"test accuracy {(logits.argmax(-1) == test['label']).mean():.1%}")
