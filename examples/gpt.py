"""A GPT on the bytes of Python's own standard library: flax.linen, its layers under one `nn.scan`.

    python examples/gpt.py                                             train `tiny` and print losses
    jaxmem compare examples/gpt.py --remat none,full,dots              what each policy saves and costs
    jaxmem compare examples/gpt.py --set dropout=0.1 --set layers=8    the same for another shape
    jaxmem analyze examples/gpt.py:gpt2_124m                           GPT-2 small, planned without allocating it

The text is on every machine that runs this, so nothing is downloaded.
"""

import sysconfig
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

import jaxmem

# ---------------------------------------------------------------- the model


class Block(nn.Module):
    """One pre-norm transformer layer; `(batch, time, width) → (batch, time, width)`.

    The values have MaxText's names, so its remat presets apply: `--remat save_qkv_proj`.
    """

    heads: int
    depth: int  # of the whole model: projections into the residual stream start smaller by 1 / sqrt(2 depth)
    dropout: float
    train: bool
    dtype: Any

    @nn.compact
    def __call__(self, x, _=None):
        batch, time, width = x.shape
        drop = nn.Dropout(self.dropout, deterministic=not self.train)
        normal = nn.initializers.normal(0.5 / width**0.5)  # GPT-2's 0.02 at width 768, and as well-scaled at 64
        small = nn.initializers.normal(0.5 / width**0.5 / (2 * self.depth) ** 0.5)

        h = nn.LayerNorm(dtype=self.dtype, name="norm_attention")(x)
        qkv = nn.Dense(3 * width, dtype=self.dtype, kernel_init=normal, name="qkv")(h)
        qkv = checkpoint_name(qkv, "qkv_proj")
        query, key, value = jnp.split(qkv.reshape(batch, time, 3 * self.heads, width // self.heads), 3, axis=2)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / (width // self.heads) ** 0.5
        scores = jnp.where(jnp.tri(time, dtype=bool), scores.astype(jnp.float32), -jnp.inf)  # softmax in float32
        weights = drop(jax.nn.softmax(scores).astype(self.dtype))
        context = jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, time, width)
        context = checkpoint_name(context, "context")
        out = nn.Dense(width, dtype=self.dtype, kernel_init=small, name="attention_out")(context)
        x = x + drop(checkpoint_name(out, "out_proj"))

        h = nn.LayerNorm(dtype=self.dtype, name="norm_mlp")(x)
        h = nn.Dense(4 * width, dtype=self.dtype, kernel_init=normal, name="mlp_in")(h)
        h = checkpoint_name(h, "mlpwi")  # the input of gelu: its derivative needs nothing else, its output is cheap
        out = nn.Dense(width, dtype=self.dtype, kernel_init=small, name="mlp_out")(nn.gelu(h))
        x = x + drop(checkpoint_name(out, "mlpwo"))
        return x, None  # nn.scan wants (carry, output)


class GPT(nn.Module):
    """Token ids `(batch, time)` → float32 logits `(batch, time, vocabulary)`."""

    vocabulary: int
    seq: int
    layers: int
    width: int
    heads: int
    dropout: float
    memory: jaxmem.Memory

    @nn.compact
    def __call__(self, tokens, *, train: bool):
        dtype = self.memory.compute_dtype  # parameters stay float32, see flax's param_dtype
        normal = nn.initializers.normal(0.5 / self.width**0.5)
        embed = nn.Embed(self.vocabulary, self.width, dtype=dtype, embedding_init=normal, name="embed")
        position = self.param("position", normal, (self.seq, self.width))
        x = embed(tokens) + position[: tokens.shape[1]].astype(dtype)
        x = nn.Dropout(self.dropout, deterministic=not train)(x)

        # One traced layer, run `layers` times; `memory.block` applies the configured remat to each of them.
        stack = nn.scan(
            self.memory.block(Block, scanned=True),
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            length=self.layers,
        )
        x, _ = stack(self.heads, self.layers, self.dropout, train, dtype, name="blocks")(x, None)

        x = nn.LayerNorm(dtype=dtype, name="norm_out")(x)
        return embed.attend(x).astype(jnp.float32)  # the output layer is the embedding, transposed


def loss_fn(model, batch):
    """Nats per token; `batch["tokens"]` is `(batch, time + 1)`, each position predicts the next one."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    logits = model(inputs, train=True)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    hits = (logits.argmax(-1) == targets).astype(jnp.float32)
    return jaxmem.LossOutput(
        jaxmem.WeightedMean(nats.sum(), targets.size),
        metrics={
            "bits": jaxmem.WeightedMean(nats.sum() / np.log(2), targets.size),
            "accuracy": jaxmem.WeightedMean(hits.sum(), targets.size),
        },
    )


# ---------------------------------------------------------------- the text


def standard_library(max_bytes: int = 2**21) -> np.ndarray:
    """The top-level modules of the running Python, end to end, as `(bytes,)` uint8."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    if len(text) < 2**16:
        raise FileNotFoundError(f"Wanted the sources of Python's standard library; got {len(text)} bytes in {folder}.")
    return np.frombuffer(text[:max_bytes], np.uint8)


def random_crops(text: np.ndarray, batch: int, seq: int, seed: int = 0):
    """A function of the window index, so that a resumed run gets the same batches."""

    def data(window: int):
        starts = np.random.Generator(np.random.Philox(key=[seed, window])).integers(len(text) - seq, size=batch)
        return {"tokens": text[starts[:, None] + np.arange(seq + 1)].astype(np.int32)}

    return data


# ---------------------------------------------------------------- the presets


def workload(
    *,
    batch: int = 16,
    seq: int = 64,
    layers: int = 4,
    width: int = 64,
    heads: int = 4,
    dropout: float = 0.0,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> jaxmem.Workload:
    """`tiny`: bytes of the standard library, under 2.6 nats a byte within 200 steps on a CPU."""
    data = random_crops(standard_library(), batch, seq, seed)
    warmup = optax.linear_schedule(0.0, learning_rate, 20)
    return jaxmem.Workload.from_linen(
        lambda memory: GPT(256, seq, layers, width, heads, dropout, memory),
        loss_fn,
        data(0),
        optax.adamw(warmup, b2=0.95, weight_decay=0.1),
        rng=jax.random.key(seed),
        data=data,
    )


def gpt2_124m(*, batch: int = 8, seq: int = 1024, dropout: float = 0.1) -> jaxmem.Workload:
    """GPT-2 small, 124,439,808 parameters; shapes only, nothing is allocated before `step.init`."""
    warmup = optax.linear_schedule(0.0, 6e-4, 2000)
    return jaxmem.Workload.from_linen(
        lambda memory: GPT(50257, 1024, 12, 768, 12, dropout, memory),
        loss_fn,
        {"tokens": jax.ShapeDtypeStruct((batch, seq + 1), jnp.int32)},
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(warmup, b2=0.95, weight_decay=0.1)),
        rng=jax.random.key(0),
    )


if __name__ == "__main__":
    tiny = workload()
    step = jaxmem.make_train_step(tiny, jaxmem.MemoryConfig(accumulation_steps=2, remat="full"))
    jaxmem.train_loop(
        step,
        step.init(),
        tiny.data,
        200,
        on_metrics=lambda m: print(f"step {m['step']:3d}  {m['loss']:.3f} nats a byte, {m['accuracy']:.0%} guessed"),
    )
