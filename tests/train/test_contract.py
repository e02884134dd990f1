"""The contract of every technique: the step equals the plain one-batch step, written here without jaxmem.

Every pair of: kind {function, linen, nnx}, remat preset, compute dtype, K that divides B. With uneven token counts,
permuted rows and dropout.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

from jaxmem import LossOutput, Max, MemoryConfig, Sum, WeightedMean, Workload, accumulate, make_train_step
from jaxmem.train._program import jitted

B, T, D, VOCAB, LAYERS = 4, 6, 16, 11, 2
REMAT = ("none", "full", "dots", "dots_no_batch")
OPTIMIZER = optax.sgd(0.5, momentum=0.9)
# Largest relative L2 distance of a leaf from the float32 one-batch step.
TOLERANCE = {"float32": 2e-6, "bfloat16": 3e-2}


def make_batch(seed=0):
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, VOCAB, (B, T))
    lengths = np.array([6, 1, 0, 3])  # uneven, one row empty
    mask = (np.arange(T) < lengths[:, None]).astype(np.float32)
    return {"tokens": jnp.asarray(tokens), "mask": jnp.asarray(mask)}


def output(logits, batch):
    """Cross-entropy of the valid tokens plus a mean over examples, and one metric of each kind."""
    logits = logits.astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["tokens"]) * batch["mask"]
    correct = (logits.argmax(-1) == batch["tokens"]) * batch["mask"]
    tokens = batch["mask"].sum()
    return LossOutput(
        WeightedMean(losses.sum(), tokens) + 0.1 * WeightedMean((logits**2).mean((1, 2)).sum(), logits.shape[0]),
        {
            "accuracy": WeightedMean(correct.sum(), tokens),
            "tokens": Sum(tokens),
            "max_logit": Max(logits.max()),
        },
    )


# -- the same small model, three times ------------------------------------------------------------


class Function:
    """A plain function with its blocks in a scan."""

    def __init__(self, rate):
        self.rate = rate

    def params(self):
        keys = jax.random.split(jax.random.key(1), 3)
        return {
            "embed": jax.random.normal(keys[0], (VOCAB, D)),
            "w": jax.random.normal(keys[1], (LAYERS, D, D)) / 4,
            "out": jax.random.normal(keys[2], (D, VOCAB)) / 4,
        }

    def logits(self, params, batch, rng, block=lambda fn: fn, dtype=jnp.float32):
        def layer(x, w, key):
            y = jnp.tanh(x @ w.astype(dtype))
            keep = jax.random.bernoulli(key, 1 - self.rate, y.shape)
            return x + jnp.where(keep, y, 0)

        x = params["embed"].astype(dtype)[batch["tokens"]]
        keys = jax.random.split(rng, LAYERS)
        layer = block(layer)
        x, _ = jax.lax.scan(lambda x, wk: (layer(x, *wk), None), x, (params["w"], keys))
        return x @ params["out"].astype(dtype)

    def workload(self, batch):
        def loss(params, batch, *, rng, memory):
            block = lambda fn: memory.block(fn, scanned=True)  # noqa: E731
            return output(self.logits(params, batch, rng, block, memory.compute_dtype), batch)

        return Workload(loss, self.params(), batch, OPTIMIZER, rng=jax.random.key(7))


class LinenBlock(nn.Module):
    rate: float
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, x, *, train):
        y = jnp.tanh(nn.Dense(D, dtype=self.dtype)(x))
        return x + nn.Dropout(self.rate, deterministic=not train)(y)


class LinenModel(nn.Module):
    rate: float
    block: object = LinenBlock
    dtype: object = jnp.float32

    @nn.compact
    def __call__(self, tokens, train):
        x = nn.Embed(VOCAB, D, dtype=self.dtype)(tokens)
        for _ in range(LAYERS):
            x = self.block(self.rate, dtype=self.dtype)(x, train=train)
        return nn.Dense(VOCAB, dtype=self.dtype)(x)


class Linen:
    def __init__(self, rate):
        self.rate = rate

    def logits(self, params, batch, rng):
        return LinenModel(self.rate).apply({"params": params}, batch["tokens"], True, rngs={"dropout": rng})

    def workload(self, batch):
        return Workload.from_linen(
            lambda memory: LinenModel(self.rate, memory.block(LinenBlock), memory.compute_dtype),
            lambda model, batch: output(model(batch["tokens"], train=True), batch),
            batch,
            OPTIMIZER,
            rng=jax.random.key(7),
        )


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(D, D, rngs=rngs)

    def __call__(self, x, key, *, rate):
        y = jnp.tanh(self.dense(x))
        return x + jnp.where(jax.random.bernoulli(key, 1 - rate, y.shape), y, 0)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, D, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs) for _ in range(LAYERS)])
        self.out = nnx.Linear(D, VOCAB, rngs=rngs)

    def __call__(self, tokens, rng, rate, block=lambda b: b):
        x = self.embed(tokens)
        for layer, key in zip(self.blocks, jax.random.split(rng, LAYERS), strict=True):
            x = block(layer)(x, key, rate=rate)
        return self.out(x)


class Nnx:
    """Without `memory.compute_dtype`: nnx casts here through the dtype that its layers were made with."""

    def __init__(self, rate):
        self.rate = rate

    def logits(self, params, batch, rng):
        graph = nnx.graphdef(NnxModel(nnx.Rngs(3)))
        return nnx.merge(graph, params, copy=True)(batch["tokens"], rng, self.rate)

    def workload(self, batch):
        def loss(model, batch, *, rng, memory):
            for _, module in nnx.iter_modules(model):
                if hasattr(module, "dtype"):
                    module.dtype = memory.compute_dtype
            return output(model(batch["tokens"], rng, self.rate, memory.block), batch)

        return Workload.from_nnx(NnxModel(nnx.Rngs(3)), loss, batch, OPTIMIZER, rng=jax.random.key(7))


KINDS = {"function": Function, "linen": Linen, "nnx": Nnx}


# -- the plain step --------------------------------------------------------------------------------


def plain_step(kind, params, batch, key, num_micro_batches):
    """One differentiation of the whole batch's objective, in float32; dropout keys as each micro-batch has them."""
    k = num_micro_batches
    parts = [accumulate.micro_batch(batch, i, k) for i in range(k)]
    keys = [key] if k == 1 else [jax.random.fold_in(key, i) for i in range(k)]

    def objective(params):
        outs = [output(kind.logits(params, part, key), part) for part, key in zip(parts, keys, strict=True)]
        terms = zip(*(out.objective.terms() for out in outs), strict=True)
        value = sum(term[0][0] * sum(t.total for _, t in term) / sum(t.weight for _, t in term) for term in terms)
        metrics = {
            "accuracy": sum(o.metrics["accuracy"].total for o in outs)
            / sum(o.metrics["accuracy"].weight for o in outs),
            "tokens": sum(o.metrics["tokens"].value for o in outs),
            "max_logit": jnp.max(jnp.stack([o.metrics["max_logit"].value for o in outs])),
        }
        return value, {"loss": value, **metrics}

    grads, metrics = jax.grad(objective, has_aux=True)(params)
    updates, _ = OPTIMIZER.update(grads, OPTIMIZER.init(params), params)
    return optax.apply_updates(params, updates), metrics


def relative_l2(got, want):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    return np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-12)


def assert_close(got, want, tolerance):
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        assert relative_l2(g, w) <= tolerance, jax.tree_util.keystr(path)


@functools.cache
def initial_params(name):
    return jax.tree.map(np.asarray, make_train_step(KINDS[name](0.0).workload(make_batch())).init().params)


@functools.cache
def wanted(name, rate, k):
    """The plain step's updates and metrics on the first batch; window 0's key for its dropout."""
    params = initial_params(name)
    step = jax.jit(lambda params, key: plain_step(KINDS[name](rate), params, make_batch(), key, k))
    new, metrics = step(params, jax.random.fold_in(jax.random.key(7), 0))
    return updates(new, params), metrics


def updates(new, old):
    return jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), new, old)


def run(name, rate, batch, **config):
    """Two steps: the first one's updates and metrics."""
    step = make_train_step(KINDS[name](rate).workload(batch), MemoryConfig(**config))
    old = initial_params(name)
    state, metrics = step(step.init(), batch)
    first = updates(state.params, old)
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(state.params))
    state, _ = step(state, batch)
    assert jitted(step.spec)._cache_size() == 1  # one trace
    assert int(state.step) == int(state.window) == 2
    return first, metrics


def rotated(remats, ks):
    """(kind, remat, K), in which any two of the three meet."""
    cells = itertools.product(enumerate(KINDS), enumerate(remats))
    return [(name, remat, ks[(i + j) % len(ks)]) for (i, name), (j, remat) in cells]


CELLS = [(name, remat, "float32", k) for name, remat, k in rotated(REMAT, (1, 2, 4))]
CELLS += [(name, remat, "bfloat16", k) for name, remat, k in rotated(REMAT[:2], (4, 2, 1))]


@pytest.mark.parametrize("name, remat, dtype, k", CELLS)
def test_step_equals_the_plain_step(name, remat, dtype, k):
    got, metrics = run(name, 0.0, make_batch(), accumulation_steps=k, remat=remat, precision=dtype)
    want, want_metrics = wanted(name, 0.0, 1)
    assert_close(got, want, TOLERANCE[dtype])  # the updates are the gradients, up to a factor
    if dtype == "bfloat16":  # the argmax of nearly equal logits may differ
        metrics = {key: value for key, value in metrics.items() if key != "accuracy"}
        want_metrics = {key: want_metrics[key] for key in metrics}
    assert_close(metrics, want_metrics, TOLERANCE[dtype])


def test_a_float16_step_equals_the_plain_step():
    """One cell, as its cost is that of bfloat16's; all kinds have their tests in test_loss_scale.py."""
    got, metrics = run("linen", 0.0, make_batch(), accumulation_steps=4, precision="float16")
    assert int(metrics["skipped"]) == 0
    assert_close(got, wanted("linen", 0.0, 1)[0], 5e-3)


@pytest.mark.parametrize("name, remat, k", rotated(("none", "full", "dots"), (4, 1)))
def test_dropout_masks_are_those_of_the_micro_batch_keys(name, remat, k):
    got, metrics = run(name, 0.5, make_batch(), accumulation_steps=k, remat=remat)
    want, want_metrics = wanted(name, 0.5, k)
    assert_close(got, want, TOLERANCE["float32"])
    assert_close(metrics, want_metrics, TOLERANCE["float32"])


@pytest.mark.parametrize("name", KINDS)
def test_permuted_rows_give_the_same_step(name):
    permuted = jax.tree.map(lambda x: x[np.array([2, 0, 3, 1])], make_batch())
    got, metrics = run(name, 0.0, permuted, accumulation_steps=2)
    want, want_metrics = wanted(name, 0.0, 1)
    assert_close(got, want, TOLERANCE["float32"])
    assert_close(metrics, want_metrics, TOLERANCE["float32"])
