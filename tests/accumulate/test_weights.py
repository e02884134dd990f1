"""The weights pre-pass: it costs no forward pass, repeats no side effect, and refuses what would not be exact."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

from jaxmem import LossOutput, WeightedMean
from jaxmem.accumulate import value_and_grad
from jaxmem.analysis import hlo_flops
from jaxmem.errors import DifferentiableWeight, ObjectiveError
from tests.accumulate.problems import accumulated

D, B = 8, 8
W = jnp.eye(D) / 2
BATCH = {"x": jnp.ones((B, D)), "mask": (jnp.arange(B) % 3 > 0).astype(jnp.float32)}


def with_matmuls(layers):
    """A loss whose layers multiply matrices and whose weight is a count of the mask."""

    def loss(w, batch):
        y = layers(w, batch["x"])
        return WeightedMean((batch["mask"] * y.sum(-1)).sum(), batch["mask"].sum())

    return loss


def unrolled(w, x):
    return jnp.tanh(jnp.tanh(x @ w) @ w)


def scanned(w, x):
    return jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), x, length=3)[0]


def rematted(w, x):
    return jax.lax.scan(lambda x, _: (jax.checkpoint(lambda x: jnp.tanh(x @ w))(x), None), x, length=3)[0]


def jitted(w, x):
    return jax.jit(unrolled)(w, x)


def branched(w, x):
    return jax.lax.cond(x[0, 0] > 0, unrolled, lambda w, x: x, w, x)


def carrying_the_weight(w, batch):
    """Loss and weight come out of one scan over time; only the weight's part of it may be repeated."""

    def step(carry, x):
        total, weight = carry
        return (total + (jnp.tanh(x @ w) * batch["mask"][:, None]).sum(), weight + batch["mask"].sum()), None

    return WeightedMean(*jax.lax.scan(step, (0.0, 0.0), jnp.stack([batch["x"]] * 3))[0])


def while_in_the_weight(w, batch):
    """The weight is counted by a loop whose length depends on the data."""
    _, weight = jax.lax.while_loop(
        lambda c: c[0] < batch["mask"].sum(), lambda c: (c[0] + 1, c[1] + batch["mask"].mean()), (0.0, 0.0)
    )
    return WeightedMean(unrolled(w, batch["x"]).sum(), weight)


LOSSES = {
    "unrolled": with_matmuls(unrolled),
    "inner scan": with_matmuls(scanned),
    "remat in scan": with_matmuls(rematted),
    "inner jit": with_matmuls(jitted),
    "cond": with_matmuls(branched),
    "weight out of a scan": carrying_the_weight,
    "weight by a while loop": while_in_the_weight,
}


def compiled_flops(loss, k, **keywords):
    fn = jax.jit(value_and_grad(loss, k))
    return hlo_flops(fn.lower(W, BATCH, **keywords).compile().as_text()).flops


@pytest.mark.parametrize("name", LOSSES)
def test_accumulation_costs_no_flops(name):
    """Matrix products of K=4, loops multiplied out, are exactly those of the whole batch."""
    once = compiled_flops(LOSSES[name], 1)
    assert once >= 2 * 2 * B * D * D  # forward and backward of at least one product
    assert compiled_flops(LOSSES[name], 4) == once


def test_a_weight_that_depends_on_carried_state_pays_a_forward_and_is_right():
    def loss(w, batch, *, state):
        y = unrolled(w, batch["x"])
        weight = batch["mask"].sum() * state
        return LossOutput(WeightedMean((batch["mask"] * y.sum(-1)).sum(), weight), state=state + jnp.tanh(y).mean())

    assert compiled_flops(loss, 4, state=jnp.float32(1)) > compiled_flops(loss, 1, state=jnp.float32(1))
    out = accumulated(loss, 4)(W, BATCH, state=jnp.float32(1))
    state, total, weight = 1.0, 0.0, 0.0
    for i in range(4):
        micro = jax.tree.map(lambda x, i=i: x[i::4], BATCH)
        part = loss(W, micro, state=state)
        total, weight, state = total + part.objective.total, weight + part.objective.weight, part.state
    np.testing.assert_allclose([out.value, out.weights[0], out.state], [total / weight, weight, state], rtol=1e-6)


def test_a_weight_that_depends_on_state_that_never_changes_is_free():
    def loss(w, batch, *, state):
        weight = batch["mask"].sum() * state
        return LossOutput(WeightedMean(unrolled(w, batch["x"]).sum(), weight), state=state)

    assert compiled_flops(loss, 4, state=jnp.float32(2)) == compiled_flops(loss, 1, state=jnp.float32(2))


def test_prints_and_callbacks_happen_once_a_micro_batch(capfd):
    calls = []

    def loss(w, batch):
        jax.debug.print("rows {n}", n=batch["x"].sum())
        io_callback(lambda x: calls.append(float(x)), None, batch["mask"].sum())
        y, _ = jax.lax.scan(lambda x, _: (jax.debug.callback(calls.append, -1.0) or x @ w, None), batch["x"], length=1)
        return WeightedMean(y.sum(), batch["mask"].sum())

    jax.block_until_ready(accumulated(loss, 4)(W, BATCH))
    jax.effects_barrier()
    assert capfd.readouterr().out.count("rows 16.0") == 4
    assert sorted(calls) == [-1.0] * 4 + sorted(float(BATCH["mask"][i::4].sum()) for i in range(4))


@jax.custom_jvp
def double(x):
    return 2 * x


double.defjvp(lambda primals, tangents: (double(*primals), 2 * tangents[0]))


DEPENDENT = {
    "plainly": lambda w, x: w * x.size,
    "through stop_gradient": lambda w, x: jax.lax.stop_gradient(w) + x.size,
    "through an integer": lambda w, x: (x > w).sum(),
    "in a scan": lambda w, x: jax.lax.scan(lambda c, row: (c + w, None), 0.0, x)[0],
    "in jit": lambda w, x: jax.jit(lambda w: w + 1)(w),
    "in cond": lambda w, x: jax.lax.cond(x[0] > 0, lambda: w, lambda: 1.0),
    "as a predicate": lambda w, x: jax.lax.cond(w > 0, lambda: 1.0, lambda: 2.0),
    "in a while loop": lambda w, x: jax.lax.while_loop(lambda c: c < w, lambda c: c + 1, 0.0),
    "under remat": lambda w, x: jax.checkpoint(lambda w: jnp.sin(w))(w),
    "through custom_jvp": lambda w, x: double(w),
    "through vmap": lambda w, x: jax.vmap(lambda row: row * w)(x).sum(),
}


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("how", DEPENDENT)
def test_a_weight_that_depends_on_parameters_is_refused(how, k):
    loss = lambda p, x: WeightedMean((p["w"] * x).sum(), DEPENDENT[how](p["w"], x))  # noqa: E731
    with pytest.raises(DifferentiableWeight, match=r"weight of objective term 0 .* depends on params/w\. Compute"):
        value_and_grad(loss, k)({"a": jnp.float32(1.0), "w": jnp.float32(2.0)}, jnp.ones(4))


@jax.custom_vjp
def fused_loss(w, x, mask):
    """Total and count from one function with its own rule, as a fused cross-entropy returns them."""
    return ((x @ w) ** 2 * mask).sum(), mask.sum()


def _fused_backward(saved, cotangents):
    w, x, mask = saved
    of_total, of_count = cotangents
    return of_total * 2 * x.T @ (x @ w * mask) + 1e6 * of_count, jnp.zeros_like(x), jnp.zeros_like(mask)


fused_loss.defvjp(lambda w, x, mask: (fused_loss(w, x, mask), (w, x, mask)), _fused_backward)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_a_fused_loss_may_return_its_count(k):
    w = jnp.arange(1.0, 4.0)
    batch = {"x": jax.random.normal(jax.random.key(0), (8, 3)), "mask": jnp.array([1.0, 1, 0, 1, 0, 0, 0, 1])}
    want = jax.grad(lambda w: jnp.mean((batch["x"] @ w) ** 2, where=batch["mask"] > 0))(w)
    loss = lambda w, batch: WeightedMean(*fused_loss(w, batch["x"], batch["mask"]))  # noqa: E731
    got = value_and_grad(loss, k)(w, batch)
    np.testing.assert_allclose(got.grads, want, rtol=1e-5)


def test_the_refused_term_is_named_by_its_number():
    loss = lambda w, x: WeightedMean((w * x).sum(), x.size) + WeightedMean(w, 1.0 * w)  # noqa: E731
    with pytest.raises(DifferentiableWeight, match="objective term 1"):
        value_and_grad(loss, 2)(jnp.float32(1.0), jnp.ones(4))


def test_a_mask_that_merely_travels_with_the_parameters_is_fine():
    """Weight and loss leave the same jit, scan and remat; only the loss depends on w."""

    @jax.jit
    @jax.checkpoint
    def both(w, x, m):
        return jax.lax.scan(lambda c, row: ((c[0] + w * row[0] * row[1], c[1] + row[1]), None), (0.0, 0.0), (x, m))[0]

    x, m = jnp.arange(4.0), jnp.array([1.0, 0.0, 1.0, 1.0])
    out = accumulated(lambda w, b: WeightedMean(*both(w, *b)), 2)(jnp.float32(1.0), (x, m))
    np.testing.assert_allclose(out.grads, 5 / 3, rtol=1e-6)


@pytest.mark.parametrize(
    "factor",
    [
        lambda w, x, rng, state: w,
        lambda w, x, rng, state: x.mean(),
        lambda w, x, rng, state: jax.random.uniform(rng),
        lambda w, x, rng, state: state,
    ],
    ids=["parameters", "batch", "key", "state"],
)
def test_a_factor_that_varies_is_refused(factor):
    def loss(w, x, *, rng, state):
        return 2.0 * WeightedMean((w * x).sum(), x.size) + factor(w, x, rng, state) * WeightedMean(w, 1)

    with pytest.raises(ObjectiveError, match="factor of objective term 1 to be a constant of the step"):
        value_and_grad(loss, 2)(jnp.float32(1.0), jnp.ones(4), rng=jax.random.key(0), state=jnp.float32(1.0))


def test_a_factor_may_be_closed_over():
    @jax.jit
    def step(factor, w, x):
        return value_and_grad(lambda w, x: factor * WeightedMean((w * x).sum(), x.size), 2)(w, x)

    assert float(step(jnp.float32(3.0), jnp.float32(1.0), jnp.arange(4.0)).grads) == 4.5


@pytest.mark.parametrize(
    "objective, message",
    [
        (lambda x: x, r"value = float32\[2\]"),
        (lambda x: WeightedMean(x, 1), r"total = float32\[2\]"),
        (lambda x: WeightedMean(x.sum(), x), r"weight = float32\[2\]"),
        (lambda x: WeightedMean(x.sum(), None), "weight = NoneType"),
        (lambda x: WeightedMean(x.sum(), True), "weight = bool"),
        (lambda x: x.sum().astype(int), r"value = int32\[\]"),
        (lambda x: x.sum() * 1j, r"value = complex64\[\]"),
        (lambda x: None, "value = NoneType"),
        (lambda x: (x.sum(), {}), "a tuple of 2.*has_aux=True"),
        (lambda x: {"loss": x.sum()}, "value = dict"),
    ],
)
def test_what_is_not_an_objective_is_refused(objective, message):
    with pytest.raises(ObjectiveError, match=message):
        value_and_grad(lambda w, x: objective(w * x), 2)(jnp.float32(1.0), jnp.ones(4))


def test_weights_that_are_the_same_for_every_micro_batch_are_not_looped_over():
    fn = functools.partial(value_and_grad(lambda w, x: WeightedMean((w * x).sum(), x.size), 4), jnp.float32(1.0))
    assert str(jax.make_jaxpr(fn)(jnp.ones(8))).count("scan[") == 1
