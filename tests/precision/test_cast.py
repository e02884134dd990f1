"""Computing in bfloat16 with float32 masters: what is cast, what is not, and what gradients come back as."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxmem import LossOutput, MemoryConfig, Precision, Sum, WeightedMean, Workload, make_train_step
from jaxmem.errors import PrecisionWithoutEffect
from jaxmem.precision import cast_floating, compute_in, uses_dtype

BF16 = jnp.bfloat16


def test_only_real_floating_leaves_are_cast():
    tree = {
        "f32": jnp.ones(2),
        "f16": jnp.ones(2, jnp.float16),
        "numpy": np.ones(2),
        "python": 1.5,
        "int": jnp.arange(2),
        "bool": jnp.array(True),
        "complex": jnp.ones(2, jnp.complex64),
        "key": jax.random.key(0),
        "none": None,
    }
    got = cast_floating(tree, BF16)
    assert all(got[name].dtype == BF16 for name in ("f32", "f16", "numpy", "python"))
    assert (got["int"].dtype, got["bool"].dtype, got["complex"].dtype) == (jnp.int32, jnp.bool_, jnp.complex64)
    assert got["key"].dtype == tree["key"].dtype and got["none"] is None


def test_gradients_come_back_in_the_masters_dtype():
    seen = {}

    def loss(params, batch, *, state):
        seen.update(w=params["w"].dtype, x=batch["x"].dtype, ids=batch["ids"].dtype, state=state.dtype)
        return (params["w"] * batch["x"]).sum()

    batch = {"x": jnp.full(4, 1 / 3), "ids": jnp.arange(4)}
    grads = jax.grad(compute_in(loss, BF16))({"w": jnp.ones(4)}, batch, state=jnp.ones(()))
    assert seen == {"w": BF16, "x": BF16, "ids": jnp.int32, "state": jnp.float32}
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["w"], np.float32(BF16(1 / 3)))


def test_uses_dtype_looks_at_every_depth():
    def deep(x):
        def step(x, _):
            double = lambda x: (x.astype(BF16) * 2).astype(x.dtype)  # noqa: E731
            return jax.lax.cond(x.sum() > 0, double, jnp.sin, x), None

        return jax.jit(jax.checkpoint(lambda x: jax.lax.scan(step, x, length=2)[0]))(x)

    assert uses_dtype(jax.make_jaxpr(deep)(jnp.ones(2)).jaxpr, BF16)
    assert not uses_dtype(jax.make_jaxpr(deep)(jnp.ones(2)).jaxpr, jnp.float16)
    assert not uses_dtype(jax.make_jaxpr(lambda x: 2.0)(jnp.ones(2, BF16)).jaxpr, BF16)  # given, not computed


def loss(params, batch):
    """Mean square error, and the sum of the compute dtype's name, so to speak."""
    error = batch["x"] @ params["w"] - batch["y"]
    narrow = jnp.int32(error.dtype == BF16)
    return LossOutput(WeightedMean((error.astype(jnp.float32) ** 2).sum(), error.size), {"narrow": Sum(narrow)})


def workload(loss_fn=loss, **fields):
    rng = np.random.default_rng(0)
    batch = {"x": jnp.asarray(rng.normal(size=(8, 3)), jnp.float32), "y": jnp.asarray(rng.normal(size=8), jnp.float32)}
    return Workload(loss_fn, {"w": jnp.ones(3)}, batch, optax.sgd(0.1), **fields)


@pytest.mark.parametrize("k", [1, 2])
def test_the_step_computes_in_bfloat16_and_keeps_float32_masters(k):
    work = workload()
    got = {}
    for dtype in ("float32", "bfloat16"):
        step = make_train_step(work, MemoryConfig(accumulation_steps=k, precision=dtype))
        state, metrics = step(step.init(), work.batch)
        assert int(metrics["narrow"]) == (k if dtype == "bfloat16" else 0)
        assert state.params["w"].dtype == metrics["loss"].dtype == jnp.float32
        got[dtype] = np.asarray(state.params["w"])
    assert not (got["bfloat16"] == got["float32"]).all()
    np.testing.assert_allclose(got["bfloat16"], got["float32"], atol=1e-2)


def test_master_parameters_in_another_dtype():
    work = workload()
    step = make_train_step(work, MemoryConfig(precision=Precision(params="bfloat16")))
    state = step.init()
    assert state.params["w"].dtype == BF16
    state, metrics = step(state, work.batch)
    assert state.params["w"].dtype == BF16 and int(metrics["narrow"]) == 0  # computed in float32


def test_a_loss_with_memory_gets_the_dtype_and_the_masters_as_they_are():
    seen = []

    def own(params, batch, *, memory):
        seen.append((memory.compute_dtype, params["w"].dtype, batch["x"].dtype))
        return loss(jax.tree.map(lambda p: p.astype(memory.compute_dtype), params), batch)

    step = make_train_step(workload(own), MemoryConfig(precision="bfloat16"))
    step.lower()
    assert set(seen) == {(jnp.dtype(BF16), jnp.dtype("float32"), jnp.dtype("float32"))}


def test_a_loss_with_memory_that_ignores_the_dtype_is_an_error():
    step = make_train_step(
        workload(lambda params, batch, *, memory: loss(params, batch)), MemoryConfig(precision="bfloat16")
    )
    with pytest.raises(PrecisionWithoutEffect, match=r"computes in memory\.compute_dtype \(bfloat16\)"):
        step.lower()
    make_train_step(step.workload, MemoryConfig(precision="float32")).lower()


def test_the_accumulators_dtype_is_of_the_precision_or_of_the_config():
    for config in (
        MemoryConfig(accumulator_dtype="bfloat16"),
        MemoryConfig(precision=Precision(accumulator="bfloat16")),
    ):
        assert config.dtypes.accumulator == "bfloat16"
    work = workload()
    temps = []
    for dtype in ("float32", "bfloat16"):
        step = make_train_step(work, MemoryConfig(accumulation_steps=4, accumulator_dtype=dtype))
        text = step.lower().as_text()
        temps.append("tensor<3xbf16>" in text)
    assert temps == [False, True]
