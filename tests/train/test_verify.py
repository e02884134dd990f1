"""`verify` passes honest configs, and fails steps that do not compute or keep what they promise."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from examples import gpt, resnet_batchnorm, vit_nnx
from jaxmem import MemoryConfig, Policy, Workload, make_train_step
from jaxmem.errors import MiscompiledError, WorkloadError
from jaxmem.train import Verifier, verify
from jaxmem.train._leaves import worst_leaf

ROWS, WIDTH, LAYERS = 16, 16, 2
MASK = (np.arange(ROWS) % 2 == 0) | (np.arange(ROWS) > 12)  # micro-batches of unequal weight


def errors(params, batch, memory, rng=None):
    """Squared errors by row: layers under a scan, with dropout if there is a key."""

    def layer(x, w):
        w = w.astype(memory.compute_dtype)
        x = checkpoint_name(jnp.sin(jnp.tanh(checkpoint_name(x @ w, "hidden"))), "output")
        if rng is not None:
            x = jnp.where(jax.random.bernoulli(rng, 0.8, x.shape), x, 0)
        return x, None

    x = batch["x"].astype(memory.compute_dtype)
    x, _ = jax.lax.scan(memory.block(layer, scanned=True), x, params["layers"])
    return jnp.sum(x.astype(jnp.float32) ** 2, axis=1)


def honest(params, batch, *, memory):
    return jaxmem.WeightedMean(jnp.sum(errors(params, batch, memory) * batch["mask"]), jnp.sum(batch["mask"]))


def mean_of_means(params, batch, *, memory):
    return jnp.sum(errors(params, batch, memory) * batch["mask"]) / jnp.sum(batch["mask"])


def two_terms_with_dropout(params, batch, *, memory, rng):
    rows = errors(params, batch, memory, rng)
    penalty = jaxmem.Sum(jnp.sum(batch["x"] @ params["layers"][0]))
    return jaxmem.WeightedMean(jnp.sum(rows * batch["mask"]), jnp.sum(batch["mask"])) + 0.01 * penalty + jnp.mean(rows)


def with_running_mean(params, batch, *, memory, state, momentum=0.9):
    rows = errors(params, batch, memory)
    new = {"mean": momentum * state["mean"] + (1 - momentum) * jnp.mean(rows), "count": state["count"] + 1}
    centred = rows - jax.lax.stop_gradient(state["mean"])
    return jaxmem.LossOutput(jaxmem.WeightedMean(jnp.sum(centred**2), rows.size), state=new)


def workload_of(loss, **fields) -> Workload:
    rng = np.random.default_rng(0)
    batch = {"x": jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32), "mask": jnp.asarray(MASK, jnp.float32)}
    params = {"layers": jnp.asarray(rng.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5, jnp.float32)}
    return Workload(loss, params, fields.pop("batch", batch), optax.adam(1e-3), **fields)


def verified(loss, reference=None, *, fields=None, **config):
    step = make_train_step(workload_of(loss, **(fields or {})), MemoryConfig(**config))
    return verify(step, reference, target="cpu")


@pytest.mark.parametrize(
    "config",
    [
        {"remat": "dots"},
        {"accumulation_steps": 2, "precision": "bfloat16"},
        {"accumulation_steps": 4, "remat": "full", "precision": "bfloat16", "accumulator_dtype": "bfloat16"},
    ],
    ids=str,
)
def test_honest_configs_pass(config):
    found = verified(honest, **config)
    assert found.verdict == "pass", str(found)
    assert found.tolerance_dtype == config.get("precision", "float32")
    assert found.reference == "the plain step on the whole batch"
    if "remat" in config:
        assert found.residual_bytes < found.reference_residual_bytes
        assert found.recompute_flops == found.asked_recompute_flops
    else:
        assert [check.name for check in found.checks] == ["gradients", "loss"]  # nothing else is promised


def test_a_mean_of_means_fails_when_micro_batches_weigh_differently():
    assert verified(mean_of_means).verdict == "pass"
    found = verified(mean_of_means, accumulation_steps=2)
    assert found["gradients"].verdict == found["loss"].verdict == "fail" and not found.passed
    assert found.gradient_path == "layers" and found.gradient_error > 0.01


def test_a_policy_that_keeps_everything_fails():
    def one_value_a_layer(params, batch, *, memory):
        layer = memory.block(lambda x, w: (jnp.sin(checkpoint_name(x @ w, "hidden")), None), scanned=True)
        return jnp.mean(jax.lax.scan(layer, batch["x"], params["layers"])[0] ** 2)

    found = verified(one_value_a_layer, remat=Policy(save=("hidden",)))
    assert found["gradients"].verdict == "pass" and found["residuals"].verdict == "fail", str(found)


def test_a_loss_that_marks_no_block_fails():
    def unmarked(params, batch, *, memory):
        return honest(params, batch, memory=jaxmem.Memory())

    found = verified(unmarked, remat="full")
    assert found["residuals"].verdict == "fail" and "marks none" in found["residuals"].detail


@pytest.mark.parametrize("steps", [1, 4])
def test_dropout_is_compared_with_the_same_masks(steps):
    found = verified(two_terms_with_dropout, accumulation_steps=steps)
    assert found.verdict == "pass", str(found)
    assert ("one by one" in found.reference) == (steps > 1)


def test_model_state_is_compared_after_the_step():
    state = {"mean": jnp.zeros(()), "count": jnp.zeros((), jnp.int32)}
    found = verified(with_running_mean, accumulation_steps=2, fields={"state": state})
    assert found["state"].verdict == "pass" and found.state_error < 1e-6
    slower = lambda *args, **keywords: with_running_mean(*args, momentum=0.5, **keywords)  # noqa: E731
    other = make_train_step(
        workload_of(lambda p, b, *, memory, state: slower(p, b, memory=memory, state=state), state=state)
    )
    found = verified(with_running_mean, other, fields={"state": state})
    assert found["gradients"].verdict == "pass" and found["state"].verdict == "fail"


def test_a_reference_of_ones_own():
    doubled = make_train_step(workload_of(lambda p, b, *, memory: 2.0 * honest(p, b, memory=memory)))
    found = verified(honest, doubled)
    assert found.gradient_error == pytest.approx(0.5, rel=1e-3) and found["gradients"].verdict == "fail"
    assert found.reference == "the reference step"


def test_the_parameters_key_and_batch_may_be_given():
    step = make_train_step(workload_of(two_terms_with_dropout), MemoryConfig(accumulation_steps=2))
    state = step.init(jax.random.key(5))
    state = dataclasses.replace(state, params=jax.tree.map(lambda leaf: leaf * 0.5, state.params))
    batch = jax.tree.map(lambda leaf: leaf * 2, step.workload.batch)
    found = verify(step, state=state, batch=batch, target="cpu")
    assert found.verdict == "pass", str(found)
    assert found.loss == pytest.approx(float(step(state, batch)[1]["loss"]), rel=1e-5)  # and `state` was not donated


def test_a_batch_of_shapes_is_filled_and_said_to_be():
    batch = {"x": jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), "mask": jax.ShapeDtypeStruct((ROWS,), jnp.int32)}
    found = verified(honest, accumulation_steps=2, fields={"batch": batch})
    assert found.verdict == "pass" and "only a shape" in found.notes[0]


def test_a_batch_that_cannot_be_filled_says_what_to_pass():
    batch = {"x": jax.ShapeDtypeStruct((ROWS,), jax.dtypes.prng_key), "mask": jnp.ones(ROWS)}
    with pytest.raises(WorkloadError, match="batch/x.*verify\\(step, batch="):
        verified(honest, fields={"batch": batch})


def test_parameters_that_are_only_shapes_say_what_to_give():
    workload = workload_of(honest)
    shapes = jax.eval_shape(lambda params: params, workload.params)
    with pytest.raises(WorkloadError, match="real parameters"):
        verify(make_train_step(dataclasses.replace(workload, params=shapes)), target="cpu")


@pytest.mark.parametrize("limit", [1000, 6000])  # below the state alone; between the state and the whole step
def test_what_this_machine_cannot_hold_is_not_run_but_still_compiled(limit):
    step = make_train_step(workload_of(honest), MemoryConfig(accumulation_steps=2, remat="full"))
    found = Verifier(target="cpu", limit_bytes=limit).check(step)
    assert found["gradients"].verdict == found.verdict == "uncertain" and found.passed
    assert "to spare" in found["gradients"].detail
    assert found["residuals"].verdict == "pass" and found.loss is None


def test_offload_is_not_evidenced_on_a_cpu():
    found = verified(honest, remat=Policy(offload=("hidden",)))
    assert found["gradients"].verdict == "pass" and found["host"].verdict == "uncertain", str(found)


def test_theworst_leaf():
    ones = {"a": np.ones(4), "b": np.zeros(4), "n": np.arange(3)}
    assert worst_leaf(ones, ones)[0] == 0
    assert worst_leaf({**ones, "a": np.full(4, 1.5)}, ones) == (0.5, "a")
    error, path = worst_leaf({**ones, "b": np.full(4, 1e-6)}, ones)  # a gradient of zero, and rounding
    assert path == "b" and error < 1e-3
    assert worst_leaf({**ones, "b": np.full(4, np.nan)}, ones) == (float("inf"), "b")
    assert worst_leaf({**ones, "n": np.arange(1, 4)}, ones) == (float("inf"), "n")
    assert worst_leaf(None, None) == (0.0, "")


def test_the_result_is_json_and_reads_well():
    found = verified(mean_of_means, accumulation_steps=2, remat="full")
    loaded = json.loads(found.to_json())
    assert loaded["verdict"] == "fail" and loaded["checks"][0]["name"] == "gradients"
    assert str(found).startswith("step on cpu: fail, against ")
    with pytest.raises(KeyError):
        found["host"]


def test_only_steps_are_verified():
    with pytest.raises(WorkloadError, match="make_train_step"):
        verify(workload_of(honest))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("workload", "config"),
    [
        (lambda: gpt.workload(batch=4, seq=8, layers=2, width=16, heads=2), {"remat": "full"}),
        (lambda: vit_nnx.workload(batch=4, layers=1, width=16, heads=2), {"precision": "bfloat16"}),
        (lambda: resnet_batchnorm.workload(batch=8, stages=(1, 1), width=4), {"accumulation_steps": 2}),
    ],
    ids=["gpt", "vit", "resnet"],
)
def test_the_examples_pass(workload, config):
    found = verify(make_train_step(workload(), MemoryConfig(**config)), target="cpu")
    assert found.verdict == "pass", str(found)


def test_a_program_that_was_not_run_is_not_called_verified():
    step = make_train_step(workload_of(honest), MemoryConfig(accumulation_steps=2))
    here, away = verify(step, target="cpu"), verify(step, target="gpu-h100")
    assert here.verified and here.verdict == "pass" and here.compared_on == away.compared_on == "cpu"
    assert away["gradients"].verdict == "pass" and away["backend"].verdict == away.verdict == "uncertain"
    assert away.passed and not away.verified  # nothing is broken, as far as anybody can tell here
    assert "that of gpu-h100 was not run" in away["backend"].detail and "computed on cpu" in str(away)
    assert away.to_dict()["compared_on"] == "cpu"


def test_a_miscompiled_program_fails(monkeypatch):
    def refused(*args, **kwargs):
        raise MiscompiledError(wanted="a compiler that compiles 'full' right", got="XLA:GPU", do="Change it.")

    monkeypatch.setattr("jaxmem.train._verify.report", refused)
    found = verify(make_train_step(workload_of(honest), MemoryConfig(remat="full")), target="gpu-h100")
    assert found["compiler"].verdict == found.verdict == "fail" and "compiles 'full' right" in found["compiler"].detail
