"""Model state: carried from micro-batch to micro-batch, or combined from all of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem import LossOutput, WeightedMean
from jaxmem.accumulate import value_and_grad
from jaxmem.errors import StateError
from tests.accumulate.problems import accumulated

X = jnp.array([3.0, 5.0, 1.0, 9.0])  # with K=4, micro-batch i is row i


def new_state(state, x):
    """An average, a counter, a maximum and the like; each leaf from the state that this micro-batch sees."""
    return {
        "ema": 0.5 * state["ema"] + 0.5 * x.mean(),
        "n": state["n"] + x.size,
        "max": jnp.maximum(state["max"], x.max()),
        "seen": state["seen"] | (x > 8).any(),
    }


def loss(w, x, *, state):
    return LossOutput(WeightedMean((w * x).sum(), x.size), state=new_state(state, x))


START = {"ema": jnp.float32(8), "n": jnp.int32(10), "max": jnp.float32(4), "seen": jnp.bool_(False)}


def run(reduction, k=4, state=START):
    out = accumulated(loss, k, state_reduction=reduction)(jnp.float32(1.0), X, state=state)
    assert jax.tree.map(lambda leaf: leaf.dtype, out.state) == jax.tree.map(lambda leaf: leaf.dtype, state)
    return {name: leaf.item() for name, leaf in out.state.items()}


def test_carry_is_sequential():
    state = START
    for i in range(4):
        state = new_state(state, X[i : i + 1])
    assert run("carry") == {name: leaf.item() for name, leaf in state.items()}
    assert run("carry")["n"] == 14


def test_each_collection_reduces_in_its_own_way():
    # With anything but carry, each micro-batch sees the start: its ema is 4 + x/2, its n is 11.
    names = {"ema": "mean", "n": "sum", "max": "max", "seen": "carry"}
    assert run(names) == {"ema": 4 + 18 / 4 / 2, "n": 14, "max": 9.0, "seen": True}
    names = {"ema": "last", "n": "last", "max": "last", "seen": "max"}
    assert run(names) == {"ema": 8.5, "n": 11, "max": 9.0, "seen": True}
    names = {"ema": "sum", "n": "max", "max": "mean", "seen": "last"}
    # The increments of ema: -2.5, -1.5, -3.5, 0.5; the maxima seen: 4, 5, 4, 9.
    assert run(names) == {"ema": 8 - 7.0, "n": 11, "max": 5.5, "seen": True}


def test_one_micro_batch_is_the_plain_step_for_every_reduction():
    plain = {name: leaf.item() for name, leaf in new_state(START, X).items()}
    for reduction in ("carry", "last", {"ema": "mean", "n": "sum", "max": "max", "seen": "max"}):
        assert run(reduction, k=1) == plain


def test_max_does_not_remember_the_start():
    """The largest of what micro-batches returned, though that be below the initial state."""
    loss = lambda w, x, state: LossOutput((w * x).mean(), state=x.max())  # noqa: E731
    out = accumulated(loss, 4, state_reduction="max")(jnp.float32(1.0), X - 20, state=jnp.float32(0))
    assert float(out.state) == -11


def test_sums_and_means_of_bfloat16_do_not_stagnate():
    """Case 19's kind of fault: 512 increments of 1 to a bfloat16 counter, which stops at 256."""

    def loss(w, x, *, state):
        return LossOutput((w * x).mean(), state={"sum": state["sum"] + jnp.bfloat16(1), "mean": state["mean"] * 0 + 1})

    start = {"sum": jnp.bfloat16(1), "mean": jnp.bfloat16(0)}
    run = accumulated(loss, 512, state_reduction={"sum": "sum", "mean": "mean"})
    out = run(jnp.float32(1.0), jnp.ones(512), state=start).state
    assert out["sum"].dtype == jnp.bfloat16
    assert (float(out["sum"]), float(out["mean"])) == (512.0, 1.0)  # 513 rounds to 512 in bfloat16


def test_keys_and_python_numbers_are_carried():
    def loss(w, x, *, state):
        return LossOutput((w * x).mean(), state={"key": jax.random.split(state["key"])[0], "n": state["n"] + 1})

    out = accumulated(loss, 2)(jnp.float32(1.0), X, state={"key": jax.random.key(0), "n": 3})
    want = jax.random.split(jax.random.split(jax.random.key(0))[0])[0]
    assert (jax.random.key_data(out.state["key"]) == jax.random.key_data(want)).all() and int(out.state["n"]) == 5


@pytest.mark.parametrize("k", [1, 4])
def test_a_loss_that_returns_no_state_leaves_it_as_it_was(k):
    loss = lambda w, x, state: (w * x * state["s"]).mean()  # noqa: E731
    out = accumulated(loss, k)(jnp.float32(1.0), X, state={"s": jnp.float32(2.0), "none": None})
    assert float(out.state["s"]) == 2.0 and out.state["none"] is None and float(out.value) == 9.0


def test_gradients_do_not_flow_through_the_state():
    """Each micro-batch is differentiated alone: carried state is a constant of the next one."""
    loss = lambda w, x, state: LossOutput((w * x * state).mean(), state=state * w)  # noqa: E731
    out = accumulated(loss, 2)(jnp.float32(3.0), jnp.ones(2), state=jnp.float32(1.0))
    assert float(out.grads) == (1.0 + 3.0) / 2 and float(out.state) == 9.0


def returning(state):
    return lambda w, x, **_: LossOutput((w * x).mean(), state=state)


@pytest.mark.parametrize(
    "loss, state, options, message",
    [
        (returning({"a": jnp.ones(3)}), {"a": jnp.ones(2)}, {}, r"float32\[2\] at state/a; got float32\[3\]"),
        (returning({"a": jnp.ones(2, jnp.int32)}), {"a": jnp.ones(2)}, {}, r"got int32\[2\]"),
        (returning({"b": jnp.ones(2)}), {"a": jnp.ones(2)}, {}, "a new state of the structure passed in"),
        (returning({"a": jnp.ones(2)}), None, {}, "Pass the initial state"),
        (loss, START, {"state_reduction": "median"}, "'median' for state/ema"),
        (loss, START, {"state_reduction": {"ema": "mean"}}, "state_reduction to be a pytree prefix"),
        (loss, START, {"state_reduction": "mean"}, "'mean' can combine; got int32 at state/n"),
        (loss, START, {"state_reduction": "sum"}, "'sum' can combine; got bool at state/seen"),
        (loss, jax.random.key(0), {"state_reduction": "max"}, "'max' can combine; got key"),
    ],
)
def test_states_that_cannot_be_combined(loss, state, options, message):
    with pytest.raises(StateError, match=message):
        value_and_grad(loss, 2, **options)(jnp.float32(1.0), X, state=state)


def test_batch_statistics_are_those_of_a_loop_over_micro_batches():
    """Case 7 without flax: normalisation is per micro-batch, running statistics are sequential."""
    x = jnp.asarray(np.random.default_rng(0).normal(2.0, 3.0, (8, 3)).astype(np.float32))

    def norm_loss(w, x, *, state):
        mean, var = x.mean(0), x.var(0)
        running = {"mean": 0.9 * state["mean"] + 0.1 * mean, "var": 0.9 * state["var"] + 0.1 * var}
        return LossOutput((w * (x - mean) / jnp.sqrt(var + 1e-5)).mean(), state=running)

    state = {"mean": jnp.zeros(3), "var": jnp.ones(3)}
    out = accumulated(norm_loss, 4)(jnp.ones(3), x, state=state)
    for i in range(4):
        state = norm_loss(jnp.ones(3), x[i::4], state=state).state
    np.testing.assert_allclose(out.state["mean"], state["mean"], rtol=1e-6)
    np.testing.assert_allclose(out.state["var"], state["var"], rtol=1e-6)
