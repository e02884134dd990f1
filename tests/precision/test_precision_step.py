"""Precision as a whole step sees it: what is counted stays exact, outputs have the dtype that was asked for."""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmem import LossOutput, MemoryConfig, Precision, Sum, WeightedMean, Workload, analyze, make_train_step
from jaxmem.errors import ConfigError
from jaxmem.train._update import make_update

ROWS = 8 * 257  # bfloat16 cannot hold 2056; its neighbours are 2048 and 2064


def masked_workload():
    def loss(params, batch):
        losses = (batch["x"] @ params - 1) ** 2 * batch["mask"]
        tokens = batch["mask"].sum()
        return LossOutput(WeightedMean(losses.sum(), tokens), {"tokens": Sum(tokens)})

    return Workload(loss, jnp.ones(4), {"x": jnp.ones((ROWS, 4)), "mask": jnp.ones(ROWS)}, optax.sgd(0.1))


@pytest.mark.parametrize("k", [1, 8])
def test_a_float_mask_is_counted_exactly_in_bfloat16(k):
    workload = masked_workload()
    step = make_train_step(workload, MemoryConfig(accumulation_steps=k, precision="bfloat16"))
    _, metrics = step(step.init(), workload.batch)
    assert metrics["tokens"] == ROWS
    assert metrics["loss"] == 9.0
    assert f"tensor<{ROWS // k}x4xbf16>" in step.lower().as_text()  # x is computed with in bfloat16


def test_outputs_have_the_dtype_asked_for():
    workload = masked_workload()
    for output, want in ((None, jnp.float32), ("bfloat16", jnp.bfloat16)):
        step = make_train_step(workload, MemoryConfig(precision=Precision(compute="bfloat16", output=output)))
        _, metrics = jax.eval_shape(step, step.abstract_state(), workload.batch)
        assert {name: leaf.dtype for name, leaf in metrics.items()} == {"tokens": want, "loss": want}


def test_two_spellings_of_one_precision_are_equal():
    assert MemoryConfig(precision=Precision(compute="bfloat16")) == MemoryConfig(precision="bfloat16")
    assert MemoryConfig(precision=Precision(compute="bfloat16", params="bfloat16")) != MemoryConfig(
        precision="bfloat16"
    )


def test_float64_is_refused_where_jax_would_make_float32_of_it():
    with pytest.raises(ConfigError, match="jax_enable_x64"):
        make_train_step(masked_workload(), MemoryConfig(accumulator_dtype="float64"))


@pytest.mark.parametrize("dtype, k, told", [("bfloat16", 8, True), ("bfloat16", 1, False), ("float32", 8, False)])
def test_case_19_sums_in_a_narrow_dtype_appear_in_the_report(dtype, k, told):
    report = analyze(masked_workload(), MemoryConfig(accumulation_steps=k, accumulator_dtype=dtype), target="cpu")
    assert any("8 micro-batches are summed in bfloat16" in warning for warning in report.warnings) == told


def test_case_20_the_accumulators_of_a_step_have_the_configured_dtype():
    """maxtext#5039: the carry of the scan, from its jaxpr; in bfloat16 it takes half the bytes."""
    params = {"w": jnp.ones((3, 5), jnp.bfloat16), "b": jnp.ones(7)}
    loss = lambda p, x: WeightedMean(x.sum() * p["w"].astype(jnp.float32).sum() * p["b"].sum(), x.size)  # noqa: E731
    sizes = {}
    for dtype in (jnp.float32, jnp.bfloat16):
        config = MemoryConfig(accumulation_steps=4, accumulator_dtype=dtype)
        step = make_train_step(Workload(loss, params, jnp.ones(8), optax.sgd(0.1)), config)
        jaxpr = jax.make_jaxpr(make_update(step.spec))(step.abstract_state(), step.abstract_batch())
        (scan,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
        carry = [v.aval for v in scan.outvars if v.aval.shape in ((3, 5), (7,))]
        assert [aval.dtype for aval in carry] == [dtype, dtype]
        sizes[dtype] = sum(aval.size * aval.dtype.itemsize for aval in carry)
    assert sizes[jnp.float32] == 2 * sizes[jnp.bfloat16] == 22 * 4
