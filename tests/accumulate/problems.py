"""Small losses that several test files accumulate, and the comparison that all of them make."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import LossOutput, Max, Sum, WeightedMean
from jaxmem.accumulate import value_and_grad

IGNORED = -100


def token_batch(lengths, width=4, seed=0):
    """Rows of tokens, the first `lengths[i]` of row i valid and the others labelled IGNORED."""
    rng = np.random.default_rng(seed)
    lengths = np.asarray(lengths)
    labels = rng.integers(0, 3, (len(lengths), width))
    labels = np.where(np.arange(width) < lengths[:, None], labels, IGNORED)
    x = rng.normal(size=(len(lengths), width, 2)).astype(np.float32)
    return {"x": jnp.asarray(x), "labels": jnp.asarray(labels)}


def token_params(seed=1):
    return {"w": jnp.asarray(np.random.default_rng(seed).normal(size=(2, 3)).astype(np.float32))}


def token_losses(params, batch):
    """Cross-entropy of each token, 0 where it is ignored, and which tokens are valid."""
    valid = batch["labels"] != IGNORED
    logits = batch["x"] @ params["w"]
    picked = jnp.take_along_axis(logits, jnp.where(valid, batch["labels"], 0)[..., None], -1)[..., 0]
    return jnp.where(valid, jax.nn.logsumexp(logits, -1) - picked, 0.0), valid


def token_loss(params, batch):
    """The mean over valid tokens, with a metric of each kind that adds up."""
    losses, valid = token_losses(params, batch)
    logits = batch["x"] @ params["w"]
    correct = (logits.argmax(-1) == batch["labels"]) & valid
    return LossOutput(
        WeightedMean(losses.sum(), valid.sum()),
        {"acc": WeightedMean(correct.sum(), valid.sum()), "n_tokens": Sum(valid.sum()), "max_logit": Max(logits.max())},
    )


def token_mean(params, batch):
    """What `token_loss` must come to on the whole batch, as one plain differentiable function."""
    losses, valid = token_losses(params, batch)
    return losses.sum() / valid.sum()


def stack_loss(params, x):
    """Layers in a scan, whose carry holds a number that starts as a constant."""

    def layer(carry, w):
        x, norm = carry
        x = jnp.tanh(x @ w)
        return (x, norm + (x**2).sum()), None

    (x, norm), _ = jax.lax.scan(jax.checkpoint(layer), (x, 0.0), params["w"])
    losses = jax.nn.logsumexp(x @ params["out"], -1)
    return WeightedMean(losses.sum(), losses.size) + 0.1 * WeightedMean(norm, losses.size)


def accumulated(loss, num_micro_batches, **options):
    """`value_and_grad` under jit: one compile, where running it operation by operation takes dozens."""
    return jax.jit(value_and_grad(loss, num_micro_batches, **options))


def assert_trees_close(got, want, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, g), w in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(g, w, rtol=rtol, atol=atol, err_msg=jax.tree_util.keystr(path))
