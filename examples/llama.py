"""A Llama on the bytes of Python's own standard library: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

    python examples/llama.py                                               train `tiny` and print losses
    jaxmem compare examples/llama.py --remat none,full,dots_no_batch       what each policy saves and costs
    jaxmem analyze examples/llama.py:llama3_8b --set layers=2 --set seq=1024   two of the 32 layers of Llama 3 8B

`llama3_8b` and `llama3_70b` are shapes only: a plan for them allocates nothing.
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


def rotate(x, theta: float):
    """Rotary positions on `(batch, time, ..., head_dim)`: the pair (i, i + half) turns by time / theta^(i / half)."""
    time, half = x.shape[1], x.shape[-1] // 2
    angle = jnp.arange(time)[:, None] * theta ** (-jnp.arange(half) / half)  # float32
    angle = angle.reshape(time, *[1] * (x.ndim - 3), half)
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Block(nn.Module):
    """One layer; `(batch, time, width) → (batch, time, width)`.

    The values have MaxText's names, so its remat presets apply: `--remat save_qkv_proj`.
    """

    heads: int
    kv_heads: int  # each key and value head serves heads / kv_heads query heads
    hidden: int
    theta: float
    dtype: Any

    @nn.compact
    def __call__(self, x, _=None):
        batch, time, width = x.shape
        head_dim, groups = width // self.heads, self.heads // self.kv_heads
        common = {"use_bias": False, "dtype": self.dtype, "kernel_init": nn.initializers.normal(0.5 / width**0.5)}

        h = nn.RMSNorm(1e-5, dtype=self.dtype, name="norm_attention")(x)
        query = nn.DenseGeneral((self.kv_heads, groups, head_dim), **common, name="query")(h)
        key = nn.DenseGeneral((self.kv_heads, head_dim), **common, name="key")(h)
        value = nn.DenseGeneral((self.kv_heads, head_dim), **common, name="value")(h)
        query = checkpoint_name(rotate(query, self.theta), "query_proj")  # rotated, as used in the scores
        key = checkpoint_name(rotate(key, self.theta), "key_proj")
        value = checkpoint_name(value, "value_proj")
        scores = jnp.einsum("bqkgd,bskd->bkgqs", query, key) / head_dim**0.5
        scores = jnp.where(jnp.tri(time, dtype=bool), scores.astype(jnp.float32), -jnp.inf)  # softmax in float32
        weights = jax.nn.softmax(scores).astype(self.dtype)
        context = jnp.einsum("bkgqs,bskd->bqkgd", weights, value).reshape(batch, time, width)
        context = checkpoint_name(context, "context")
        x = x + checkpoint_name(nn.Dense(width, **common, name="attention_out")(context), "out_proj")

        h = nn.RMSNorm(1e-5, dtype=self.dtype, name="norm_mlp")(x)
        gate = checkpoint_name(nn.Dense(self.hidden, **common, name="mlp_gate")(h), "mlpwi_0")  # the input of silu
        up = checkpoint_name(nn.Dense(self.hidden, **common, name="mlp_up")(h), "mlpwi_1")
        x = x + checkpoint_name(nn.Dense(width, **common, name="mlp_down")(nn.silu(gate) * up), "mlpwo")
        return x, None  # nn.scan wants (carry, output)


class Llama(nn.Module):
    """Token ids `(batch, time)` → float32 logits `(batch, time, vocabulary)`."""

    vocabulary: int
    layers: int
    width: int
    heads: int
    kv_heads: int
    hidden: int
    theta: float
    memory: jaxmem.Memory

    @nn.compact
    def __call__(self, tokens):
        dtype = self.memory.compute_dtype  # parameters stay float32, see flax's param_dtype
        normal = nn.initializers.normal(0.5 / self.width**0.5)
        x = nn.Embed(self.vocabulary, self.width, dtype=dtype, embedding_init=normal, name="embed")(tokens)

        # One traced layer, run `layers` times; `memory.block` applies the configured remat to each of them.
        stack = nn.scan(
            self.memory.block(Block, scanned=True),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=self.layers,
        )
        x, _ = stack(self.heads, self.kv_heads, self.hidden, self.theta, dtype, name="blocks")(x, None)

        x = nn.RMSNorm(1e-5, dtype=dtype, name="norm_out")(x)
        logits = nn.Dense(self.vocabulary, use_bias=False, dtype=dtype, kernel_init=normal, name="unembed")(x)
        return logits.astype(jnp.float32)


def loss_fn(model, batch):
    """Nats per token; `batch["tokens"]` is `(batch, time + 1)`, each position predicts the next one."""
    inputs, targets = batch["tokens"][:, :-1], batch["tokens"][:, 1:]
    logits = model(inputs)
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
    kv_heads: int = 2,
    hidden: int = 176,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> jaxmem.Workload:
    """`tiny`: bytes of the standard library."""
    data = random_crops(standard_library(), batch, seq, seed)
    warmup = optax.linear_schedule(0.0, learning_rate, 20)
    return jaxmem.Workload.from_linen(
        lambda memory: Llama(256, layers, width, heads, kv_heads, hidden, 10_000.0, memory),
        loss_fn,
        data(0),
        optax.adamw(warmup, b2=0.95, weight_decay=0.1),
        rng=jax.random.key(seed),
        data=data,
    )


def llama3_8b(*, batch: int = 4, seq: int = 8192, layers: int = 32) -> jaxmem.Workload:
    """Llama 3 8B: 8,030,261,248 parameters with its 32 layers."""
    return abstract(batch, seq, layers, width=4096, heads=32, hidden=14_336)


def llama3_70b(*, batch: int = 4, seq: int = 8192, layers: int = 80) -> jaxmem.Workload:
    """Llama 3 70B: 70,553,706,496 parameters with its 80 layers."""
    return abstract(batch, seq, layers, width=8192, heads=64, hidden=28_672)


def abstract(batch: int, seq: int, layers: int, *, width: int, heads: int, hidden: int) -> jaxmem.Workload:
    """A Llama 3 of shapes only: nothing is allocated before `step.init`."""
    warmup = optax.linear_schedule(0.0, 3e-4, 2000)
    return jaxmem.Workload.from_linen(
        lambda memory: Llama(128_256, layers, width, heads, 8, hidden, 500_000.0, memory),
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
