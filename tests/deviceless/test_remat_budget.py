"""Budgets on a GPU and a TPU that are not here: host memory is used as the solution says, peaks are within budgets."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType

from benchmarks._stacks import STACKS
from jaxmem import Workload, analyze, make_train_step
from jaxmem.remat import auto, fit_budget
from jaxmem.remat.auto import Rates, ResidualPlan, build_problem
from jaxmem.remat.auto._assignment import plain, smallest
from jaxmem.targets import resolve_target
from jaxmem.train import TrainStep
from jaxmem.train._decision import step_problem
from tests.deviceless.compiling import _PACKAGES, TARGETS, compile_on, require

STACK = dataclasses.replace(
    STACKS["gpt"], batch=4, time=128, width=128, heads=4, kv_heads=4, hidden=512, vocabulary=256, layers=4
)


def _memory(target, fn):
    return compile_on(target, jax.value_and_grad(fn), *STACK.shapes()).memory_analysis()


@pytest.mark.parametrize("target", TARGETS)
def test_offloaded_bytes_are_on_the_host(target):
    small = auto(STACK.loss(), 0.1, target=target, objective="flops", offload=True)
    solved = small.solve(*STACK.shapes())
    assert solved.recompute_flops == 0
    # A TPU pads what the head keeps of each token, [4, 128, 1], to the eight rows of a tile.
    per_token = [v for v in solved.values if v.fate == "offload" and v.layer == "head" and v.shape == (4, 128, 1)]
    padding = sum(v.size_bytes for v in per_token) if target.startswith("tpu") else 0
    assert _memory(target, small).host_temp_size_in_bytes == solved.host_bytes + padding > 0


def test_fewer_kept_bytes_are_fewer_temporaries():
    small = auto(STACK.loss(), 0.1, target="gpu-h100", objective="flops")
    assert _memory("gpu-h100", small).temp_size_in_bytes < 0.5 * _memory("gpu-h100", STACK.loss()).temp_size_in_bytes


def test_large_logits_are_not_stored_by_a_rule_round_them():
    """What follows the last block stays as it is written, and the compiler fuses it as it does without remat."""

    def loss(weights, x, tokens):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w[0]) @ w[1], None), x, weights["layers"])
        scores = jax.nn.log_softmax((x @ weights["head"]).astype(jnp.float32))
        return -jnp.take_along_axis(scores, tokens[..., None], -1).mean()

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)  # noqa: E731
    weights = {"layers": (shape(3, 1024, 4096), shape(3, 4096, 1024)), "head": shape(1024, 32_000)}
    args = weights, shape(8, 1024, 1024), jax.ShapeDtypeStruct((8, 1024), jnp.int32)
    least = smallest(build_problem(loss, args, {}, Rates.of(None), argnums=(0,)), end="everything")
    small = auto(loss, least.total_bytes, target="gpu-h100", objective="flops")
    temps = [
        compile_on("gpu-h100", jax.value_and_grad(fn), *args).memory_analysis().temp_size_in_bytes
        for fn in (small, loss)
    ]
    assert temps[0] < 0.9 * temps[1]


def test_bytes_of_a_sharded_batch_are_one_devices():
    """What the model says that a choice saves is what the compiler of eight devices says of one of them."""
    target = resolve_target("gpu-h100:1x1x8")
    require(*_PACKAGES[target.platform])
    wide = dataclasses.replace(STACK, batch=64)
    params, batch = wide.shapes()
    workload = Workload(lambda params, batch: wide.loss()(params, batch), params, batch, optax.sgd(0.1))
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))  # of explicit ones JAX asks where to gather
    step = make_train_step(workload, mesh=mesh, target=target)
    problem = step_problem(step.spec, target)
    assert problem.plain_bytes == pytest.approx(
        step_problem(make_train_step(workload).spec, target).plain_bytes / 8, rel=0.01
    )
    peaks, sizes = [], []
    for choice in (smallest(problem), plain(problem)):
        chosen = TrainStep(step.spec.with_decision(ResidualPlan(problem=problem, assignment=choice)))
        peaks.append(analyze(chosen, target=target).peak_bytes)
        sizes.append(choice.total_bytes)
    assert peaks[1] - peaks[0] == pytest.approx(sizes[1] - sizes[0], rel=0.3)
    budget = (peaks[0] + peaks[1]) // 2
    fitted = fit_budget(step, budget, max_compiles=2)
    assert fitted.decision.peak_bytes == fitted.report().peak_bytes <= budget
