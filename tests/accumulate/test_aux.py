"""`has_aux=True`: what comes back beside the loss is that of the whole batch, or is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import LossOutput, Max, Sum, WeightedMean, remat
from jaxmem.accumulate import value_and_grad
from jaxmem.errors import MetricError, ObjectiveError, StateError
from tests.accumulate.problems import assert_trees_close

X = jnp.asarray(np.random.default_rng(0).normal(size=(12, 3)).astype(np.float32))
Y = jnp.arange(12) % 4
W = jnp.asarray(np.random.default_rng(1).normal(size=(3, 4)).astype(np.float32))
BATCH = {"x": X, "y": Y}


def logits_of(w, batch):
    return jnp.tanh(batch["x"] @ w)


def nll(w, batch):
    logits = logits_of(w, batch)
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch["y"][:, None], -1)[:, 0]


EXACT = {
    "logits": logits_of,
    "flat logits": lambda w, b: jnp.repeat(logits_of(w, b), 3, axis=0),
    "rows last": lambda w, b: logits_of(w, b).T,
    "labels": lambda w, b: b["y"],
    "which are right": lambda w, b: logits_of(w, b).argmax(-1) == b["y"],
    "accuracy": lambda w, b: (logits_of(w, b).argmax(-1) == b["y"]).mean(),
    "count": lambda w, b: (logits_of(w, b).argmax(-1) == b["y"]).sum(),
    "count as a float": lambda w, b: (logits_of(w, b).argmax(-1) == b["y"]).sum().astype(jnp.float32),
    "rows": lambda w, b: jnp.asarray(b["x"].shape[0]),
    "rows as a number": lambda w, b: b["x"].shape[0],
    "values as a float": lambda w, b: float(b["x"].size),
    "ones": lambda w, b: jnp.ones(b["x"].shape[0]),
    "largest": lambda w, b: logits_of(w, b).max(),
    "largest of each class": lambda w, b: logits_of(w, b).max(0),
    "mean of each class": lambda w, b: logits_of(w, b).mean(0),
    "norm": lambda w, b: jnp.sqrt(jnp.sum(w**2)),
    "16 bits": lambda w, b: logits_of(w, b).astype(jnp.bfloat16),
    "nothing": lambda w, b: (),
    "two ones a row": lambda w, b: jnp.ones((b["x"].shape[0], 2)),
    "counts": lambda w, b: jnp.zeros(4).at[b["y"]].add(1.0),
}


@pytest.mark.parametrize("k", [1, 3, 12])
def test_aux_is_that_of_the_whole_batch(k):
    def loss(w, batch):
        return nll(w, batch).mean(), {name: fn(w, batch) for name, fn in EXACT.items()}

    (want, aux), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(W, BATCH)
    (value, got), ours = jax.jit(value_and_grad(loss, k, has_aux=True))(W, BATCH)
    assert_trees_close((value, ours), (want, grads))
    assert jax.tree.structure(got) == jax.tree.structure(aux)
    for name in EXACT:
        for ours, theirs in zip(jax.tree.leaves(got[name]), jax.tree.leaves(aux[name]), strict=True):
            assert ours.dtype == theirs.dtype, name
            np.testing.assert_allclose(ours.astype(float), theirs.astype(float), rtol=1e-5, atol=1e-6, err_msg=name)


def test_it_unpacks_and_stays_a_pytree_under_jit():
    def loss(w, batch):
        return nll(w, batch).mean(), logits_of(w, batch)

    out = jax.jit(value_and_grad(loss, 3, has_aux=True))(W, BATCH)
    (value, logits), grads = out
    assert value is out.value is out[0][0] and logits is out.aux and grads is out.grads and out.metrics == {}
    value, grads = value_and_grad(lambda w, b: nll(w, b).mean(), 3)(W, BATCH)
    assert value.shape == () and grads.shape == W.shape


def test_what_is_no_array_comes_back_as_it_is():
    fixed = {"lr": 0.1, "name": "run", "none": None}
    (_, aux), _ = value_and_grad(lambda w, b: (nll(w, b).mean(), fixed), 3, has_aux=True)(W, BATCH)
    assert aux == fixed


def test_declared_kinds_and_weighted_objectives_keep_their_meaning():
    mask = Y != 0

    def loss(w, batch):
        valid = batch["y"] != 0
        total = WeightedMean(jnp.sum(nll(w, batch) * valid), valid.sum())
        return total, {"tokens": Sum(valid.sum()), "loss": total, "top": Max(logits_of(w, batch).std(-1).max())}

    (value, aux), _ = value_and_grad(loss, 4, has_aux=True)(W, BATCH)
    want = float(jnp.sum(nll(W, BATCH) * mask) / mask.sum())
    assert float(value) == pytest.approx(want, rel=1e-5) and float(aux["loss"]) == pytest.approx(want, rel=1e-5)
    assert int(aux["tokens"]) == 9 and float(aux["top"]) == pytest.approx(float(logits_of(W, BATCH).std(-1).max()))


def test_rows_that_pad_adds_are_left_out():
    def loss(w, batch):
        valid = batch["y"] >= 0
        return WeightedMean(jnp.sum(nll(w, batch) * valid), valid.sum()), logits_of(w, batch)

    short = jax.tree.map(lambda leaf: leaf[:10], BATCH)
    (_, logits), _ = value_and_grad(loss, 4, has_aux=True, pad={"x": 0.0, "y": -1})(W, short)
    np.testing.assert_allclose(logits, logits_of(W, short), rtol=1e-5)


@pytest.mark.parametrize(
    "aux, why",
    [
        (lambda w, b: logits_of(w, b).std(), "aux.*sum over rows"),
        (lambda w, b: {"a": [jnp.sqrt(nll(w, b).mean())]}, "aux/a/0.*sqrt of a sum over rows"),
        (lambda w, b: nll(w, b).sum() / (b["y"] != 0).sum(), "a quotient"),
        (lambda w, b: logits_of(w, b) @ logits_of(w, b).T, "a product of rows with other rows"),
        (lambda w, b: jnp.sort(nll(w, b)), "sort along the axis of the rows"),
        (lambda w, b: logits_of(w, b)[:2], "slice"),
        (lambda w, b: logits_of(w, b)[::-1], "rev along the axis of the rows"),
        (lambda w, b: jnp.roll(nll(w, b), 1), "slice along the axis of the rows"),
        (lambda w, b: jnp.pad(nll(w, b), (1, 0)), "pad along the axis of the rows"),
        (lambda w, b: jnp.arange(len(b["y"])), "the place of a row in the batch"),
        (lambda w, b: jnp.full(len(b["y"]), nll(w, b).mean()), "a shape that grows with the number of rows"),
        (jax.grad(lambda w, b: nll(w, b).mean()), "a scatter by a sum over rows"),
    ],
)
def test_what_micro_batches_do_not_come_to_is_refused(aux, why):
    with pytest.raises(MetricError, match=f"(?s){why}.*state=batch_stats"):
        value_and_grad(lambda w, b: (nll(w, b).mean(), aux(w, b)), 3, has_aux=True)(W, BATCH)


@pytest.mark.parametrize(
    "loss, why",
    [
        (lambda w, b: nll(w, b).sum(), "a sum over rows"),
        (lambda w, b: nll(w, b).max(), "a maximum over rows"),
        (lambda w, b: jnp.sqrt(nll(w, b).mean()), "sqrt of a sum"),
        (lambda w, b: (nll(w, b) * (b["y"] > 0)).sum() / (b["y"] > 0).sum(), "a quotient by one"),
        (lambda w, b: (nll(w, b) * (b["y"] > 0)).sum() / ((b["y"] > 0).sum() + 1e-8), "grows with the rows"),
        (lambda w, b: jax.lax.cond((b["y"] > 0).sum() > 0, nll(w, b).mean, lambda: 0.0), "a conditional"),
        (lambda w, b: jax.nn.relu(nll(w, b).mean() - 1), "max of a sum"),
        (lambda w, b: jnp.linalg.cholesky(logits_of(w, b).T @ logits_of(w, b)).sum(), "cholesky"),
        (lambda w, b: (jnp.sort(logits_of(w, b).mean(0)) * W[0]).sum(), "sort of a sum"),
        (lambda w, b: jnp.maximum(jax.ops.segment_sum(jnp.ones(b["y"].shape), b["y"], 4), 2).mean(), "max of a sum"),
        (lambda w, b: jax.nn.logsumexp(nll(w, b)), "over rows"),
        (lambda w, b: nll(w, b).min(), "reduce_min over rows"),
    ],
)
def test_a_bare_scalar_that_is_no_mean_is_refused(loss, why):
    with pytest.raises(ObjectiveError, match=f"{why}.*WeightedMean"):
        value_and_grad(loss, 3)(W, BATCH)
    value_and_grad(loss, 3, check_mean=False)(W, BATCH)
    with pytest.raises(ObjectiveError, match=why):
        value_and_grad(lambda w, b: (loss(w, b), {}), 3, has_aux=True)(W, BATCH)
    value_and_grad(lambda w, b: (loss(w, b), {}), 3, has_aux=True, check_mean=False)(W, BATCH)


def test_a_trace_is_linear_in_its_matrix():
    loss = lambda w, b: jnp.trace(logits_of(w, b).T @ logits_of(w, b)) / b["x"].shape[0]  # noqa: E731
    assert_trees_close(tuple(value_and_grad(loss, 3)(W, BATCH)), jax.value_and_grad(loss)(W, BATCH))


@pytest.mark.parametrize("policy", ["full", "auto:0.5"])
def test_a_loss_under_a_policy_is_followed_like_the_loss(policy):
    def loss(w, batch, divided=False):
        x, mask = batch["x"], batch["y"] > 0
        for _ in range(4):
            x = jnp.tanh(x @ w @ w.T)
        losses, count = (x**2).sum(-1) * mask, mask.sum().astype(jnp.float32)
        return losses.sum() / count if divided else WeightedMean(losses.sum(), count), {"count": count, "x": x}

    (_, aux), _ = value_and_grad(remat.apply(loss, policy), 3, has_aux=True)(W, BATCH)
    assert float(aux["count"]) == 9
    np.testing.assert_allclose(aux["x"], loss(W, BATCH)[1]["x"], rtol=1e-5, atol=1e-6)
    with pytest.raises(ObjectiveError, match="a quotient"):
        value_and_grad(remat.apply(lambda w, b: loss(w, b, True)[0], policy), 3)(W, BATCH)


def test_a_mask_of_random_numbers_keeps_rows_apart():
    def loss(w, batch, key):
        kept = jax.random.bernoulli(key, 0.5, nll(w, batch).shape)
        losses = jnp.where(kept, nll(w, batch), 0)
        return losses.mean(), {"losses": losses, "mean": losses.mean(), "kept": kept.sum()}

    (value, aux), _ = value_and_grad(loss, 3, has_aux=True)(W, BATCH, jax.random.key(0))
    assert float(value) == pytest.approx(float(aux["losses"].mean()), rel=1e-5)
    assert float(aux["mean"]) == pytest.approx(float(value)) and int(aux["kept"]) == int((aux["losses"] > 0).sum())

    def masked(w, batch, key):
        kept = jax.random.bernoulli(key, 0.5, nll(w, batch).shape)
        return jnp.sum(nll(w, batch) * kept) / kept.sum()

    with pytest.raises(ObjectiveError, match="a quotient"):
        value_and_grad(masked, 3)(W, BATCH, jax.random.key(0))


def normalised(w, batch, state):
    """A loss with running statistics of its rows, which normalise them."""
    logits = logits_of(w, batch)
    mean = logits.mean(0)
    new = {"mean": 0.9 * state["mean"] + 0.1 * mean, "count": state["count"] + 1}
    losses = ((logits - mean) ** 2).sum(-1)
    return losses.mean(), {"new": new, "losses": losses}


def test_state_is_known_in_aux_by_its_structure_and_carried():
    state = {"mean": jnp.zeros(4), "count": jnp.zeros((), jnp.int32)}
    (value, aux), _ = value_and_grad(normalised, 3, has_aux=True)(W, BATCH, state=state)
    want, totals = state, []
    for i in range(3):
        part = jax.tree.map(lambda leaf, i=i: leaf[i::3], BATCH)
        total, own = normalised(W, part, want)
        want, totals = own["new"], [*totals, total]
    assert_trees_close(aux["new"], want)
    assert float(value) == pytest.approx(np.mean(totals), rel=1e-5) and aux["losses"].shape == (12,)
    with pytest.raises(StateError, match="2 trees"):
        value_and_grad(lambda w, b, state: (nll(w, b).mean(), [state, state]), 3, has_aux=True)(W, BATCH, state=state)
    out = value_and_grad(lambda w, b, state: (LossOutput(nll(w, b).mean(), state=state), 1.0), 3, has_aux=True)
    assert_trees_close(out(W, BATCH, state=state).state, state)


@pytest.mark.parametrize(
    "loss, has_aux, text",
    [
        (lambda w, b: (nll(w, b).mean(), {}), False, "has_aux=True"),
        (lambda w, b: nll(w, b).mean(), True, "got one value"),
        (lambda w, b: (nll(w, b).mean(), 1, 2), True, "a tuple of 3"),
        (lambda w, b: (nll(w, b), {}), True, r"value = float32\[4\]"),
    ],
)
def test_the_shape_of_what_is_returned_is_asked_for(loss, has_aux, text):
    with pytest.raises(ObjectiveError, match=text):
        value_and_grad(loss, 3, has_aux=has_aux)(W, BATCH)
