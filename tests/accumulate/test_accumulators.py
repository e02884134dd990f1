"""The dtype of sums, the loss scale, and what may not be differentiated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import LossOutput, WeightedMean
from jaxmem.accumulate import multi_steps, value_and_grad
from jaxmem.errors import ConfigError, IntegerParameterError
from tests.accumulate.problems import accumulated


def scan_carry(k, dtype, params, batch):
    """Avals of the carry of the scan over micro-batches: value, then gradients."""
    loss = lambda params, x: WeightedMean(params["w"].sum() * x.sum(), x.size)  # noqa: E731
    jaxpr = jax.make_jaxpr(value_and_grad(loss, k, accumulator_dtype=dtype))(params, batch)
    (scan,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    carry = [v.aval for v in scan.outvars]  # the scan stacks nothing, so what leaves it is its carry
    return [aval for aval in carry if aval.shape == params["w"].shape], jaxpr


def test_bfloat16_gradients_are_summed_in_float32():
    """Case 19: 1024 × 0.01 added up in bfloat16 stops at 4.0; the truth is 10.25 (0.01 is 0.010009765625 there)."""
    exact = 1024 * float(jnp.bfloat16(0.01))
    loss = lambda w, x: WeightedMean((w * x).sum(), 1.0)  # noqa: E731

    def gradient(dtype):
        out = accumulated(loss, 1024, accumulator_dtype=dtype)(jnp.bfloat16(1), jnp.full(1024, 0.01, jnp.bfloat16))
        assert out.grads.dtype == jnp.bfloat16
        return float(out.grads) * 1024  # the total weight is 1024

    assert exact == 10.25
    np.testing.assert_allclose(gradient("float32"), exact, rtol=2**-8)  # the cast back to the parameter's dtype
    assert gradient("bfloat16") < 0.5 * exact  # the opt-in does what it says


def test_the_accumulator_has_the_configured_dtype_and_is_cast_once():
    """Case 20: the scan's carry is of the configured dtype, its bytes halve, and one cast follows the scan."""
    params, batch = {"w": jnp.ones((3, 5), jnp.bfloat16)}, jnp.ones(8, jnp.bfloat16)
    for dtype in (jnp.float32, jnp.bfloat16):
        (accumulator,), jaxpr = scan_carry(4, dtype, params, batch)
        assert accumulator.dtype == dtype and accumulator.size * accumulator.dtype.itemsize == 15 * dtype.dtype.itemsize
        casts = [
            e for e in jaxpr.eqns if e.primitive.name == "convert_element_type" and e.outvars[0].aval.shape == (3, 5)
        ]
        assert [cast.outvars[0].aval.dtype for cast in casts] == ([jnp.bfloat16] if dtype == jnp.float32 else [])


def test_one_micro_batch_needs_no_accumulator():
    jaxpr = jax.make_jaxpr(value_and_grad(lambda w, x: (w * x).mean(), 1))(jnp.ones(4), jnp.ones(4))
    assert "scan" not in str(jaxpr)


@pytest.mark.parametrize("dtype", ["int32", "bf16", None, "complex64"])
def test_the_accumulator_dtype_is_checked(dtype):
    with pytest.raises(ConfigError, match="accumulator_dtype to be a floating dtype"):
        value_and_grad(lambda w, x: w, 2, accumulator_dtype=dtype)


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_loss_scale_cancels(dtype, k):
    """2**16 is infinite in float16: the division must happen in a wider dtype."""
    loss = lambda w, x: (w * x * 1e-3).astype(jnp.float32).mean()  # noqa: E731
    w, x = jnp.asarray(1.0, dtype), jnp.arange(8.0)
    out = accumulated(loss, k)(w, x, loss_scale=jnp.float32(2.0**16))
    np.testing.assert_allclose(out.grads, 3.5e-3, rtol=1e-3)
    np.testing.assert_allclose(out.value, 3.5e-3, rtol=1e-3)  # the value is not scaled
    assert out.grads.dtype == w.dtype and bool(out.finite)


def test_a_loss_scale_rescues_small_gradients():
    """Each row's share of the gradient, 1e-4 / 1e4, is 0 in float16, and not when multiplied by 2**14."""
    loss = lambda w, x: WeightedMean((w * x).astype(jnp.float32).sum(), 2500.0)  # noqa: E731
    w, x = jnp.float16(1.0), jnp.full(1024, 1e-4, jnp.float16)
    assert float(accumulated(loss, 4)(w, x).grads) == 0.0
    scaled = accumulated(loss, 4)(w, x, loss_scale=2.0**14)
    assert float(scaled.grads) == pytest.approx(1024 * 1e-4 / 1e4, abs=2.0**-24)  # the spacing of float16 there


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("k", [1, 2])
def test_finite_says_whether_value_and_gradients_are(bad, k):
    step = accumulated(lambda p, x: (p["a"] * x).mean() + p["b"] * 0, k)
    params = {"a": jnp.float32(1.0), "b": jnp.float32(1.0)}
    assert bool(step(params, jnp.ones(4)).finite)
    assert not bool(step(params, jnp.ones(4).at[3].set(bad)).finite)


def test_finite_sees_a_gradient_that_is_not_though_the_value_is():
    step = accumulated(lambda w, x: jnp.sqrt(w * x).mean(), 2)
    out = step(jnp.float32(0.0), jnp.ones(4))
    assert float(out.value) == 0.0 and not bool(out.finite)


@pytest.mark.parametrize(
    "leaf, dtype",
    [(jnp.arange(3), "int32"), (np.bool_(True), "bool"), (3, "int32"), (jax.random.key(0), "key<fry>")],
)
def test_integer_parameters_are_refused_by_path(leaf, dtype):
    with pytest.raises(IntegerParameterError, match=f"{dtype} at params/head/1"):
        value_and_grad(lambda p, x: x.mean(), 2)({"w": 1.0, "head": [2.0, leaf]}, jnp.ones(4))


@pytest.mark.parametrize("asked", [{}, {"accumulator_dtype": "bfloat16"}])
def test_a_wider_gradient_is_summed_in_its_own_dtype(asked):
    """Unless 16 bits are asked for by name; a float32 parameter beside it keeps its float32."""
    with jax.enable_x64(True):
        params = {"w": jnp.full(3, 1 / 3, jnp.float64), "z": jnp.ones(3, jnp.complex128), "n": jnp.ones(3, jnp.float32)}
        x = jnp.linspace(0.1, 0.7, 8, dtype=jnp.float64)

        def loss(params, x):
            y = jnp.tanh(x[:, None] * params["w"] * jnp.abs(params["z"])) * params["n"]
            return LossOutput(WeightedMean(y.sum(), (x > 0).sum()), {"y": WeightedMean(y.sum(), len(x))})

        want = jax.grad(lambda params, x: loss(params, x).objective.total / 8)(params, x)
        out = accumulated(loss, 4, **asked)(params, x)
        optimizer = multi_steps(optax.sgd(1.0), 2, **asked)
        state = optimizer.init(params)
        for half in (x[::2], x[1::2]):
            grads = jax.grad(lambda params, x: loss(params, x).objective.total / 4)(params, half)
            updates, state = optimizer.update(grads, state, params)
        want, *got = jax.device_get((want, out.grads, jax.tree.map(jnp.negative, updates)))
    narrow = bool(asked) and asked["accumulator_dtype"] == "bfloat16"
    for found in got:
        for name, exact in (("w", 1e-14), ("z", 1e-14), ("n", 1e-6)):
            error = np.abs(found[name] - want[name]).max() / np.abs(want[name]).max()
            # bfloat16 sums; of a complex parameter its narrowest complex dtype
            assert error < exact if not narrow else (1e-10 if name == "z" else 1e-4) < error < 2e-2, (name, error)
    assert out.weights[0].dtype == out.metrics["y"].dtype == jnp.float64
    assert state.skip_state.window_weight.dtype == (jnp.float32 if narrow else jnp.float64)
    kinds = ["bfloat16", "bfloat16", "complex64"] if narrow else ["float64", "float32", "complex128"]
    assert [str(state.acc_grads[name].dtype) for name in ("w", "n", "z")] == kinds


def test_float64_is_added_in_place():
    with jax.enable_x64(True):
        x = jnp.arange(4, dtype="float64")
        out = value_and_grad(lambda w, x: (w * x).mean(), 2, in_place=True)(jnp.float64(1), x)
        assert out.added is not None and out.added.in_place == ("params",) and out.grads.item() == 1.5
