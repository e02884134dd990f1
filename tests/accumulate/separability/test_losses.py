"""Which losses are sums over rows: told from their programs, and never wrongly of one that is not."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmem import LossOutput, Sum, WeightedMean
from jaxmem.accumulate import separable_by_rows
from tests.accumulate.problems import token_batch, token_loss, token_params

X = jnp.ones((8, 6))
W = jnp.ones((6, 6))


def verdict(loss, params=W, batch=X, **options):
    return separable_by_rows(loss, params, batch, **options)


def mlp(w, x):
    return jax.nn.gelu(jax.nn.relu(x @ w) @ w.T)


def attention(w, x):
    q, k = x @ w, jnp.tanh(x @ w)
    scores = jnp.where(jnp.tril(jnp.ones((3, 3), bool)), jnp.einsum("btd,bsd->bts", q, k), -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores / 6**0.5), x)


def scanned(w, x):
    def layer(carry, w):
        x, total = carry
        x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
        return (x, total + (x**2).sum()), x.mean(-1)

    (x, total), means = jax.lax.scan(layer, (x, 0.0), jnp.stack([w, w]))
    return total + means.sum()


def layer_norm(w, x):
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    return jnp.concatenate([x, x[:, ::-1]], -1)[:, 1:7] @ w


SEQUENCES = jnp.ones((8, 3, 6))
EQUAL = {
    "mean": (lambda w, x: mlp(w, x).mean(), X),
    "squares": (lambda w, x: jnp.mean(jnp.sum((x @ w - x) ** 2, -1)) + 0.1 * jnp.sum(w**2), X),
    "weighted": (lambda w, x: WeightedMean(mlp(w, x).sum(), x.shape[0]), X),
    "mean of one": (lambda w, x: WeightedMean(mlp(w, x).mean(), 1), X),
    "masked": (lambda w, x: WeightedMean((mlp(w, x) * (x > 0)).sum(), (x > 0).sum()), X),
    "sum": (lambda w, x: Sum(mlp(w, x).sum()), X),
    "terms": (lambda w, x: WeightedMean(mlp(w, x).sum(), x.size) + 0.1 * WeightedMean((x @ w).sum(), x.size), X),
    "attention": (lambda w, x: attention(w, x).mean(), SEQUENCES),
    "merged": (lambda w, x: (x.reshape(-1, 6) @ w).reshape(8 if len(x) == 8 else 4, -1).sum(-1).mean(), SEQUENCES),
    "scanned": (lambda w, x: WeightedMean(scanned(w, x), len(x)), X),
    "layer norm": (lambda w, x: layer_norm(w, x).mean(), X),
    "transposed": (lambda w, x: jnp.einsum("bd,de->eb", x, w).mean(), X),
    "logsumexp": (lambda w, x: WeightedMean(jax.nn.logsumexp(x @ w, -1).sum(), len(x)), X),
    "vmapped": (lambda w, x: jax.vmap(lambda row: jax.nn.softmax(row @ w)[0])(x).mean(), X),
    "conditional": (lambda w, x: jax.lax.cond(w[0, 0] > 0, jnp.sin, jnp.cos, x @ w).mean(), X),
    "loop": (lambda w, x: jax.lax.fori_loop(0, 3, lambda i, y: jnp.tanh(y @ w), x).mean(), X),
    "integers": (lambda w, t: optax.softmax_cross_entropy_with_integer_labels(w[t], t).mean(), jnp.ones(8, int)),
    "one hot": (lambda w, t: (jax.nn.one_hot(t, 6) @ w).mean(), jnp.ones(8, int)),
    "slope": (lambda w, x: (jax.grad(lambda x: jnp.tanh(x @ w).sum())(x) ** 2).mean(), X),
    "counted ones": (lambda w, x: WeightedMean((x @ w).sum(), jnp.ones(x.shape).sum()), X),
    "no rows": (lambda w, x: 0.0 * WeightedMean((w**2).sum(), 1) + (x @ w).mean(), X),
}


@pytest.mark.parametrize("name", EQUAL)
def test_sums_over_rows(name):
    loss, batch = EQUAL[name]
    assert verdict(loss, batch=batch).verdict == "yes", verdict(loss, batch=batch)


def test_the_tokens_of_all_other_tests():
    assert verdict(token_loss, token_params(), token_batch([4, 0, 1, 2])).verdict == "yes"


NOT = {
    "batch norm": (lambda w, x: ((x - x.mean(0)) @ w).mean(), "no"),
    "variance": (lambda w, x: (x * jax.lax.rsqrt(x.var(0) + 1)).mean(), "no"),
    "contrastive": (lambda w, x: jax.nn.logsumexp(x @ w @ x.T, -1).mean(), "no"),
    "softmax over rows": (lambda w, x: (jax.nn.softmax(x @ w, 0) ** 2).mean(), "no"),
    "largest row": (lambda w, x: (x @ w).max(), "no"),
    "sorted": (lambda w, x: jnp.sort(x @ w, 0)[0].sum(), "no"),
    "cumulative": (lambda w, x: (jnp.cumsum(x @ w, 0) ** 2).mean(), "no"),
    "neighbours": (lambda w, x: (x @ w * jnp.roll(x, 1, 0)).mean(), "unknown"),
    "normalised": (lambda w, x: (x @ w).sum() / (x > 0).sum(), "unknown"),
    "at least one": (lambda w, x: WeightedMean((x @ w).sum(), jnp.maximum((x > 0).sum(), 1)), "unknown"),
    "bare sum": (lambda w, x: (x @ w).sum(), "unknown"),
    "weight of one": (lambda w, x: WeightedMean((x @ w).sum(), 1), "unknown"),
    "share of rows": (lambda w, x: WeightedMean((x / len(x) @ w).sum(), (x > 0).sum()), "unknown"),
    "decay in a sum": (lambda w, x: WeightedMean((x @ w).sum() + (w**2).sum(), len(x)), "unknown"),
    "square of a sum": (lambda w, x: (x @ w).mean() ** 2, "unknown"),
    "root of the rows": (lambda w, x: (x @ w).sum() / len(x) ** 0.5, "unknown"),
    "place in the batch": (lambda w, x: (x @ w * jnp.arange(len(x))[:, None]).mean(), "unknown"),
    "divided by places": (lambda w, x: (x @ w).sum() / jnp.arange(len(x)).sum(), "unknown"),
    "weight of places": (lambda w, x: WeightedMean((x @ w).sum(), (jnp.arange(len(x)) + 1).sum()), "unknown"),
    "last place": (lambda w, x: (x @ w).mean() * jnp.cumsum(jnp.ones(len(x)))[len(x) - 1 :][0], "unknown"),
    "power of rows": (lambda w, x: ((x @ w) ** len(x)).mean(), "unknown"),
    "power of a number": (lambda w, x: (x @ w).mean() * jnp.prod(jnp.full(len(x), 0.9)), "unknown"),
    "sum for each row": (lambda w, x: jnp.full(len(x), (x @ w).sum()).mean(), "unknown"),
    "row for each row": (lambda w, x: ((x @ w)[:, None] * jnp.ones((1, len(x), 1))).sum() / len(x), "unknown"),
    "all rows for each": (lambda w, x: (jnp.ones((len(x), len(x))) @ (x @ w)).sum() / len(x), "unknown"),
    "contracted copies": (
        lambda w, x: ((x @ w).sum(1)[:, None] * jnp.ones((1, len(x))) @ jnp.ones(len(x))).mean(),
        "unknown",
    ),
    "first row": (lambda w, x: (x @ w)[0].sum(), "unknown"),
    "scan over rows": (
        lambda w, x: jax.lax.scan(lambda c, r: (c + (r @ w).sum(), None), 0.0, x)[0] / len(x),
        "unknown",
    ),
    "another program": (lambda w, x: (x @ w if len(x) > 4 else jnp.sin(x) @ w).mean(), "unknown"),
}


@pytest.mark.parametrize("name", NOT)
def test_what_is_no_sum_over_rows(name):
    loss, want = NOT[name]
    found = verdict(loss)
    assert found.verdict == want and found.why, found


def test_random_numbers_and_state():
    noisy = lambda w, x, *, rng: (x @ w * jax.random.bernoulli(rng, 0.5, x.shape)).mean()  # noqa: E731
    assert verdict(noisy, rng=jax.random.key(0)).why == "it draws random numbers"
    assert verdict(EQUAL["mean"][0], rng=jax.random.key(0)).verdict == "yes"
    counting = lambda w, x, *, state: LossOutput((x @ w).mean(), state=state + 1)  # noqa: E731
    assert verdict(counting, state=jnp.int32(0)).why == "it has model state"
    assert verdict(EQUAL["mean"][0], batch=X[:5]).why == "5 rows cannot be halved"


def test_shared_leaves_and_other_axes():
    loss = lambda w, b: ((b["x"].T + b["table"]) @ w).mean()  # noqa: E731
    batch = {"x": X.T, "table": jnp.ones(6)}
    assert verdict(loss, batch=batch, batch_axes={"x": 1, "table": None}).verdict == "yes"
    by_place = lambda w, b: ((b["x"].T + b["table"][:, None]) @ w).mean()  # noqa: E731
    batch = {"x": X[:6].T, "table": jnp.ones(6)}
    assert verdict(by_place, batch=batch, batch_axes={"x": 1, "table": None}).verdict == "unknown"
