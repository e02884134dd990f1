"""A residual network of 100 layers in plain functions, on scikit-learn's digits, with a checkpoint every 10th layer.

    pip install scikit-learn
    python examples/deep_mlp.py                                   train, then test accuracy
    jaxmem analyze examples/deep_mlp.py --set every=0             save everything, as `lax.scan` does
    jaxmem analyze examples/deep_mlp.py --set every=10            save the input of every 10th layer
    jaxmem analyze examples/deep_mlp.py:wide --set every=10       activations that fill the memory; nothing allocated

One activation is saved after every `every` layers; the activations between are recomputed in the backward pass. The
remat setting applies to the layers of the segment that is being recomputed: MemoryConfig(remat="dots") saves their
matrix products, for fewer FLOPs; "full", the default of `nested_scan`, saves only their inputs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
from jaxmem.remat import nested_scan

# ---------------------------------------------------------------- the model


def init(key, *, layers: int, width: int, features: int = 64, classes: int = 10) -> dict:
    """The parameters; each leaf of `layers` is a stack with one slice a layer."""
    key_in, key_up, key_down = jax.random.split(key, 3)
    return {
        "in": jax.random.normal(key_in, (features, width)) / features**0.5,
        "layers": {
            "scale": jnp.ones((layers, width)),
            "up": jax.random.normal(key_up, (layers, width, width)) / width**0.5,
            # 1 / √layers: the sum of all layers' contributions starts as large as the input, however deep.
            "down": jax.random.normal(key_down, (layers, width, width)) / (width * layers) ** 0.5,
        },
        "out": jnp.zeros((width, classes)),
    }


def layer(x, params):
    """One pre-norm residual layer, `(batch, width) → (batch, width)`, as the body of a scan."""
    h = x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + 1e-6) * params["scale"]
    return x + jax.nn.gelu(h @ params["up"]) @ params["down"], None


def forward(params, image, every: int):
    """Images `(batch, features)` → float32 logits `(batch, classes)`."""
    x = image @ params["in"]
    if every == 0:
        x, _ = jax.lax.scan(layer, x, params["layers"])
    else:
        x, _ = nested_scan(layer, x, params["layers"], segment=every)
    return (x @ params["out"]).astype(jnp.float32)


def loss_fn(params, batch, *, every: int):
    """Nats per image; `batch` holds `image (batch, features)` and `label (batch,)`."""
    logits = forward(params, batch["image"], every)
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    hits = (logits.argmax(-1) == batch["label"]).astype(jnp.float32)
    return jaxmem.LossOutput(
        jaxmem.WeightedMean(nats.sum(), nats.size),
        metrics={"accuracy": jaxmem.WeightedMean(hits.sum(), hits.size)},
    )


# ---------------------------------------------------------------- the digits


def digits() -> tuple[dict, dict]:
    """1,437 images to train on and 360 to test on: `image (n, 64)` float32 in 0..1, `label (n,)` int32."""
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("The digits are scikit-learn's: pip install scikit-learn", name="sklearn") from error
    bunch = load_digits()
    order = np.random.default_rng(0).permutation(len(bunch.target))
    image = (bunch.data[order] / 16).astype(np.float32)
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
    layers: int = 100,
    width: int = 32,
    every: int = 10,
    learning_rate: float = 3e-3,
    seed: int = 0,
) -> jaxmem.Workload:
    """`tiny`: the digits, narrow but 100 layers deep; about nine of ten test images correct after 100 steps."""
    data = random_rows(digits()[0], batch, seed)
    return jaxmem.Workload(
        functools.partial(loss_fn, every=every),
        functools.partial(init, layers=layers, width=width),
        data(0),
        optax.adamw(optax.linear_schedule(0.0, learning_rate, 20)),
        rng=jax.random.key(seed),
        data=data,
    )


def wide(*, batch: int = 16384, layers: int = 100, width: int = 512, every: int = 10) -> jaxmem.Workload:
    """32 MiB of activations go into each layer of 2 MiB of parameters; shapes only, nothing is allocated."""
    return jaxmem.Workload(
        functools.partial(loss_fn, every=every),
        functools.partial(init, layers=layers, width=width),
        {
            "image": jax.ShapeDtypeStruct((batch, 64), jnp.float32),
            "label": jax.ShapeDtypeStruct((batch,), jnp.int32),
        },
        optax.adamw(3e-3),
        rng=jax.random.key(0),
    )


if __name__ == "__main__":
    tiny = workload()
    step = jaxmem.make_train_step(tiny)
    state = jaxmem.train_loop(
        step,
        step.init(),
        tiny.data,
        100,
        on_metrics=lambda m: print(f"step {m['step']:3d}  loss {m['loss']:.3f}  accuracy {m['accuracy']:.0%}"),
    )
    test = digits()[1]
    logits = forward(state.params, test["image"], every=0)
    print(f"test accuracy {(logits.argmax(-1) == test['label']).mean():.1%}")
