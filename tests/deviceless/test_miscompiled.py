"""Programs that compilers of some versions made to compute wrong numbers, and the bytes and texts of their kin."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import MemoryConfig, Policy, Workload, make_train_step
from jaxmem._miscompilations import faults_met
from jaxmem.errors import MiscompiledError
from tests.deviceless.compiling import TARGETS, require

LAYERS = 4
PARAMS, ROWS = jax.ShapeDtypeStruct((LAYERS, 128, 128), "float32"), jax.ShapeDtypeStruct((512, 128), "float32")
OFFLOADED = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["h"],
    offload_src="device",
    offload_dst="pinned_host",
)


def layer(x, w):
    h = checkpoint_name(jnp.tanh(x @ w), "h")
    return x + jnp.sin(h), None


def marked(params, batch, *, memory):
    return jnp.mean(jax.lax.scan(memory.block(layer, scanned=True), batch, params)[0] ** 2)


def unmarked(params, batch):
    return jnp.mean(jax.lax.scan(jax.checkpoint(layer, policy=OFFLOADED), batch, params)[0] ** 2)


def test_an_offloading_step_is_compiled_right_and_told_how():
    require("jax-cuda12-plugin", "gpu-aot")
    workload = Workload(marked, PARAMS, ROWS, optax.sgd(0.1), compiler_options={"xla_disable_hlo_passes": "cse"})
    report = make_train_step(workload, MemoryConfig(remat=Policy(offload=("h",))), target="gpu-h100").report()
    assert report.host_temp_bytes and not [f for f in report.findings if f.kind == "miscompiled"]
    told = any("xla_disable_hlo_passes=dynamic-slice-annotator" in warning for warning in report.notes)
    assert told == bool(faults_met("gpu", offloads=True))
    make_train_step(workload, MemoryConfig(remat=Policy(offload=("h",))), target="gpu-h100").compile()


def test_offloading_of_the_users_own_is_found_in_a_function_and_refused_in_a_step():
    require("jax-cuda12-plugin", "gpu-aot")
    report = jaxmem.analyze(jax.grad(unmarked), PARAMS, ROWS, target="gpu-h100")
    found = [f for f in report.findings if f.kind == "miscompiled"]
    step = make_train_step(Workload(unmarked, PARAMS, ROWS, optax.sgd(0.1)), target="gpu-h100")
    if not faults_met("gpu", offloads=True):
        assert not found and step.report().host_temp_bytes
        return
    assert "wrong numbers" in found[0].title and found[0].title in report.warnings
    assert "dynamic-slice-annotator" in found[0].cure
    with pytest.raises(MiscompiledError, match=r"xla#46231"):
        step.compile()


def test_scattered_gradients_of_micro_batches_are_summed_over_chips_in_each():
    require("libtpu", "tpu-aot")
    mesh = AbstractMesh((4,), ("data",), axis_types=(AxisType.Auto,))  # of explicit ones JAX asks where to gather
    rows = NamedSharding(mesh, PartitionSpec("data"))
    batch = {
        "ids": jax.ShapeDtypeStruct((16, 8), "int32", sharding=rows),
        "weights": jax.ShapeDtypeStruct((16, 8, 35, 256), "float32", sharding=rows),
    }
    workload = Workload(
        lambda table, batch: jnp.mean((table[batch["ids"]] * batch["weights"]) ** 2),
        jax.ShapeDtypeStruct((96, 35, 256), "float32"),
        batch,
        optax.sgd(0.1),
    )
    config = MemoryConfig(accumulation_steps=2, gradient_reduction="each")
    report = jaxmem.analyze(workload, config, target="tpu-v4:2x2x1")  # which libtpu 0.0.42 to 0.0.48 miscompile
    assert report.gradient_reductions == 2


def test_what_jax_cannot_read_back_is_read_from_the_dump():
    require("libtpu", "tpu-aot")
    table, ids = jax.ShapeDtypeStruct((50257, 768), "bfloat16"), jax.ShapeDtypeStruct((8, 1024), "int32")
    report = jaxmem.analyze(lambda table, ids: table[ids] * 2, table, ids, target="tpu-v6e")
    assert sum(size for _, size in report.by_kind) == report.peak_bytes
    assert dict(report.by_kind)["arguments"] >= 50257 * 768 * 2
    assert report.buffer_provenance == "compiled" and report.step_seconds
    unread = [warning for warning in report.warnings if "cannot read" in warning]
    assert all("async" in warning and "from the compiler's dump" in warning for warning in unread)


def updated(moments, gradients):
    new = jax.device_put(moments, jax.memory.Space.Device) * 0.9 + gradients
    return jax.device_put(new, jax.memory.Space.Host), gradients - new


@pytest.mark.parametrize("target", TARGETS)
def test_host_bytes_are_no_part_of_the_peak(target):
    require(*{"tpu": ("libtpu", "tpu-aot"), "gpu": ("jax-cuda12-plugin", "gpu-aot")}[target[:3]])
    mesh = AbstractMesh((1,), ("data",))
    moments = jax.ShapeDtypeStruct(
        (512, 1024), "float32", sharding=NamedSharding(mesh, PartitionSpec(), memory_kind="pinned_host")
    )
    pinned = jaxmem.analyze(updated, moments, jax.ShapeDtypeStruct((512, 1024), "float32"), target=target)
    workload = Workload(marked, PARAMS, ROWS, optax.sgd(0.1))
    offloading = jaxmem.analyze(workload, MemoryConfig(remat=Policy(offload=("h",))), target=target)
    plain = jaxmem.analyze(workload, MemoryConfig(), target=target)
    for report in (pinned, offloading, plain):
        size = {name: value or 0 for name, value in dataclasses.asdict(report).items() if name.endswith("_bytes")}
        total = size["argument_bytes"] + size["output_bytes"] + size["temp_bytes"] - size["alias_bytes"]
        on_host = size["host_argument_bytes"] + size["host_output_bytes"] + size["host_temp_bytes"]
        assert bool(on_host) == (report is not plain)
        # Without host bytes the compiler's own figure counts, where it is the larger.
        assert report.peak_bytes == total or (report is plain and report.peak_bytes == report.compiler_peak_bytes)
        assert sum(each for _, each in report.by_kind) == report.peak_bytes
        assert dict(report.by_kind).get("unattributed", 0) < 0.02 * size["peak_bytes"]
    assert not [warning for warning in pinned.warnings if "donated" in warning]
