"""A ResNet with BatchNorm in flax.linen, on the 8×8 handwritten digits that scikit-learn carries with it.

    pip install scikit-learn
    python examples/resnet_batchnorm.py                                        train, then test accuracy
    jaxmem compare examples/resnet_batchnorm.py --remat none,full,dots         what each policy saves and costs
    jaxmem analyze examples/resnet_batchnorm.py:resnet50 --set batch=32        ResNet-50 at 224², nothing allocated

BatchNorm and accumulation: each micro-batch is normalised by its own statistics, and the running averages are carried
from one micro-batch to the next, as in K small steps. So gradients differ from those of the whole batch, and no
accumulation can change that. Rematerialisation changes neither, and does not count a batch twice.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

import jaxmem

# ---------------------------------------------------------------- the model


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1 convolutions around a shortcut; `(batch, h, w, c) → (batch, h / stride, w / stride, 4 width)`."""

    width: int
    stride: int
    train: bool
    dtype: Any

    @nn.compact
    def __call__(self, x):
        def conv(x, channels, size, stride=1, *, name):
            pad = [(size // 2, size // 2)] * 2
            return nn.Conv(
                channels, (size, size), stride, padding=pad, use_bias=False, dtype=self.dtype, kernel_init=he, name=name
            )(x)

        def norm(x, scale=nn.initializers.ones, *, name):
            # Statistics are float32 whatever the dtype, and so are the running averages.
            return nn.BatchNorm(
                use_running_average=not self.train, momentum=0.9, dtype=self.dtype, scale_init=scale, name=name
            )(x)

        h = nn.relu(norm(conv(x, self.width, 1, name="conv_in"), name="norm_in"))
        h = nn.relu(norm(conv(h, self.width, 3, self.stride, name="conv_mid"), name="norm_mid"))
        # With scale zero, each block starts as its shortcut.
        h = norm(conv(h, 4 * self.width, 1, name="conv_out"), nn.initializers.zeros, name="norm_out")
        if x.shape != h.shape:
            x = norm(conv(x, 4 * self.width, 1, self.stride, name="conv_shortcut"), name="norm_shortcut")
        return nn.relu(x + h)


class ResNet(nn.Module):
    """Images `(batch, side, side, channels)` → float32 logits `(batch, classes)`."""

    classes: int
    stages: tuple[int, ...]  # blocks per stage; each stage halves the side and doubles the width
    width: int
    big_images: bool  # a 7×7 stem and pooling that quarter the side, else a 3×3 stem that keeps it
    memory: jaxmem.Memory

    @nn.compact
    def __call__(self, images, *, train: bool):
        dtype = self.memory.compute_dtype  # parameters stay float32, see flax's param_dtype
        block = self.memory.block(Bottleneck)  # under the configured remat; parameter paths do not change
        size, stride = (7, 2) if self.big_images else (3, 1)
        pad = [(size // 2, size // 2)] * 2

        stem = nn.Conv(self.width, (size, size), stride, pad, use_bias=False, dtype=dtype, kernel_init=he, name="stem")
        x = stem(images)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, dtype=dtype, name="norm_stem")(x)
        x = nn.relu(x)
        if self.big_images:
            x = nn.max_pool(x, (3, 3), (2, 2), padding=[(1, 1), (1, 1)])
        for stage, blocks in enumerate(self.stages):
            for index in range(blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                x = block(self.width * 2**stage, stride, train, dtype, name=f"stage{stage}_block{index}")(x)
        x = x.mean(axis=(1, 2))
        return nn.Dense(self.classes, dtype=dtype, name="head")(x).astype(jnp.float32)


he = nn.initializers.variance_scaling(2.0, "fan_out", "truncated_normal")


def loss_fn(model, batch):
    """Nats per image; `batch` holds `image` as above and `label (batch,)`."""
    logits = model(batch["image"], train=True)
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
    stages: tuple[int, ...] = (1, 1),
    width: int = 16,
    learning_rate: float = 0.1,
    seed: int = 0,
) -> jaxmem.Workload:
    """`tiny`: the digits; over 95 % of the test images correct after 200 steps."""
    data = random_rows(digits()[0], batch, seed)
    return jaxmem.Workload.from_linen(
        lambda memory: ResNet(10, tuple(stages), width, big_images=False, memory=memory),
        loss_fn,
        data(0),
        optax.sgd(learning_rate, momentum=0.9),
        rng=jax.random.key(seed),
        data=data,
    )


def resnet50(*, batch: int = 64) -> jaxmem.Workload:
    """ResNet-50 at 224², 25,557,032 parameters; shapes only, nothing is allocated before `step.init`."""
    return jaxmem.Workload.from_linen(
        lambda memory: ResNet(1000, (3, 4, 6, 3), 64, big_images=True, memory=memory),
        loss_fn,
        {
            "image": jax.ShapeDtypeStruct((batch, 224, 224, 3), jnp.float32),
            "label": jax.ShapeDtypeStruct((batch,), jnp.int32),
        },
        optax.chain(optax.add_decayed_weights(1e-4), optax.sgd(0.1, momentum=0.9)),
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
    model = ResNet(10, (1, 1), 16, big_images=False, memory=jaxmem.Memory())
    test = digits()[1]
    logits = model.apply({"params": state.params, **state.state}, test["image"], train=False)  # running averages
    print(f"test accuracy {(logits.argmax(-1) == test['label']).mean():.1%}")
