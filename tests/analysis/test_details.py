"""What reports tell of arguments, outputs, donation and saved names."""

import dataclasses
import io

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich.console

import jaxmem
from examples import gpt
from jaxmem.analysis import Program, analyze, jaxpr_flops
from jaxmem.errors import InputError
from jaxmem.report import html_report
from jaxmem.report._views import state_dtypes
from jaxmem.report.terminal import print_report

X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def step(state, x):
    return {"w": state["w"] + x, "m": (state["m"] * 2).astype(jnp.bfloat16)}, jnp.sum(x)


def test_a_donated_leaf_whose_dtype_changes_is_a_miss():
    report = analyze(step, {"w": X, "m": X}, X, donate_argnums=0, target="cpu")
    (miss,) = report.donation_misses
    assert (miss.path, miss.size_bytes, miss.dtype_in, miss.dtype_out) == (
        "state['m']",
        64 * 64 * 4,
        "float32",
        "bfloat16",
    )
    finding = next(f for f in report.findings if f.kind == "donation_miss")
    assert "cast it back to float32" in finding.cure
    assert report.alias_bytes == 64 * 64 * 4


def test_donation_that_works_is_no_miss():
    assert analyze(lambda w, x: w + x, X, X, donate_argnums=0, target="cpu").donation_misses == ()


def test_an_unused_argument_does_not_shift_the_others():
    report = analyze(lambda a, b, c: (b * 2, c.astype(jnp.int8)), X, X, X, donate_argnums=(1, 2), target="cpu")
    assert [miss.path for miss in report.donation_misses] == ["c"]


@pytest.mark.parametrize("kinds", [("parameters", "batch"), {"w": "parameters", "x": "batch"}])
def test_kinds_of_arguments(kinds):
    def loss(w, x):
        return jnp.mean(jnp.tanh(x @ w["a"]) ** 2)

    x = jax.ShapeDtypeStruct((32, 64), jnp.float32)
    report = analyze(jax.grad(loss), {"a": X}, x, arg_kinds=kinds, target="cpu")
    by_kind = dict(report.by_kind)
    assert by_kind["parameters"] == 64 * 64 * 4
    assert by_kind["batch"] == 32 * 64 * 4
    assert by_kind["outputs"] == 64 * 64 * 4
    assert sum(by_kind.values()) == report.peak_bytes


def test_copies_of_arguments_are_told_from_them():
    """A loop's slices of its weights, and casts of them, live within the step only."""
    stack, size = jax.ShapeDtypeStruct((4, 64, 64), jnp.float32), 4 * 64 * 64 * 4

    def loss(w, x, dtype):
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w.astype(dtype))[0] ** 2)

    ops = set()
    for dtype in (jnp.float32, jnp.bfloat16):
        x = jax.ShapeDtypeStruct((32, 64), dtype)
        step = jax.grad(lambda w, x, dtype=dtype: loss(w, x, dtype).astype(jnp.float32))
        report = analyze(step, stack, x, arg_kinds=("parameters", "batch"), target="cpu")
        copies = [b for b in report.timeline.buffers if b.kind == "parameter_copies"]
        assert {b.path for b in copies} == {"w"} and not [b for b in report.buffers if b.kind == "arguments"]
        assert all(dict(moment.by_kind)["parameters"] == size for moment in report.timeline.moments)
        assert sum(part for _, part in report.by_kind) == report.peak_bytes
        ops |= {b.op for b in copies}
    assert ops == {"copy of parameter", "convert_element_type"}


def test_the_timeline_says_forward_and_backward_and_the_report_what_stands_there():
    def loss(w, x):
        return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w))  # this very line

    report = analyze(jax.grad(loss), X, X, target="cpu")
    phases = [moment.phase for moment in report.timeline.moments if moment.phase]
    assert phases == sorted(phases, reverse=True) and {*phases} == {"forward", "backward"}
    assert report.timeline.moments[0].position == 0
    forward, backward = report.timeline.phases
    assert (forward.phase, forward.start, backward.phase, backward.end) == (
        *("forward", 0),
        *("backward", report.timeline.length - 1),
    )
    assert backward.start == forward.end + 1
    (line,) = report.source_lines
    assert line.file == __file__ and line.text.endswith("# this very line")
    assert {b.source for b in report.buffers if b.source} == {f"test_details.py:{line.line}"}


def test_a_step_says_what_it_was_made_with():
    workload = jaxmem.Workload(lambda w, batch: jnp.mean((batch["x"] @ w) ** 2), X, {"x": X}, optax.adam(0.1))
    config = jaxmem.MemoryConfig(accumulation_steps=2, precision=jaxmem.Precision(optimizer="bfloat16"))
    told = {each.name: each.value for each in jaxmem.analyze(workload, config, target="cpu").settings}
    assert told["accumulation_steps"] == "2" and told["precision.optimizer"] == "bfloat16"
    assert told["batch['x']"] == "float32[64,64]"


def test_kinds_must_be_known():
    with pytest.raises(InputError, match="arg_kinds"):
        analyze(jnp.sin, X, arg_kinds={"x": "weights"})


def test_moments_of_the_timeline():
    report = analyze(lambda x: jnp.sum(jnp.sin(x) @ jnp.cos(x)), X, target="cpu")
    timeline = report.timeline
    peak = max(timeline.moments, key=lambda moment: moment.live_bytes)
    assert peak.position == timeline.peak_position
    assert peak.live_bytes == report.peak_bytes - dict(report.by_kind).get("fragmentation", 0)
    positions = [moment.position for moment in timeline.moments]
    assert positions == sorted(set(positions))
    assert positions[-1] <= timeline.length


def test_a_step_knows_the_names_of_what_it_saves():
    workload = gpt.workload(layers=2, batch=2)
    report = jaxmem.analyze(workload, jaxmem.MemoryConfig(remat="save_qkv_proj"), target="cpu")
    assert {b.saved_name for b in report.buffers} == {"", "qkv_proj"}


def test_accumulators_and_the_optimizer_are_told_apart():
    def loss(params, batch):
        return jnp.mean((jnp.tanh(batch @ params["w"]) @ params["v"]) ** 2)

    params = {"w": jax.ShapeDtypeStruct((256, 512), jnp.float32), "v": jax.ShapeDtypeStruct((512, 256), jnp.float32)}
    batch = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    workload = jaxmem.Workload(loss, params, batch, optax.adamw(1e-3))
    by_kind = dict(jaxmem.analyze(workload, jaxmem.MemoryConfig(accumulation_steps=4), target="cpu").by_kind)
    size = 2 * 256 * 512 * 4
    assert by_kind["parameters"] >= size
    assert by_kind["optimizer_state"] >= 2 * size
    assert by_kind["accumulators"] >= size
    assert by_kind["batch"] >= 8 * 256 * 4  # and a micro-batch of it


def test_recomputation_that_the_compiler_removed_is_a_finding():
    traced = jax.jit(lambda x: jnp.sum(x @ x)).trace(X)
    asked = dataclasses.replace(jaxpr_flops(traced.jaxpr), recompute=10**9)
    report = analyze(Program(name="merged", lower=traced.lower, modelled_flops=asked), target="cpu")
    (finding,) = [f for f in report.findings if f.kind == "remat_without_effect"]
    assert "removed 1.00 GFLOP" in finding.title
    assert finding.title in report.warnings


def test_an_output_is_told_of_one_donated_leaf_only():
    report = analyze(lambda a, b: (a.astype(jnp.bfloat16), b[:32]), X, X, target="cpu", donate_argnums=(0, 1))
    assert {miss.path: miss.dtype_out for miss in report.donation_misses} == {"a": "bfloat16", "b": ""}


def test_paths_beyond_ascii():
    params = {"ö\\'": X}
    report = analyze(lambda p: sum(p.values()) + 1, params, target="cpu", arg_kinds=("parameters",))
    assert [b.path for b in report.buffers if b.kind == "parameters"] == ["p[" + repr("ö\\'") + "]"]


def test_large_constants_are_told():
    table = np.random.default_rng(0).normal(size=(64, 4096)).astype(np.float32)
    report = analyze(lambda x: x @ table, X, target="cpu")
    assert any("1.0 MiB of constants" in warning for warning in report.warnings)


def scanned(weights, x):
    x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)
    return jnp.mean(x**2)


@pytest.mark.parametrize(("dtype", "kind"), [("float32", "float32"), ("bfloat16", "upcast")])
def test_wide_floats_are_judged_by_the_program(dtype, kind):
    def loss(weights, x):
        return scanned(weights, x).astype(jnp.float32) + jnp.mean(jnp.exp(x.astype(jnp.float32)))

    shapes = jax.ShapeDtypeStruct((4, 64, 64), dtype), jax.ShapeDtypeStruct((512, 64), dtype)
    report = analyze(jax.grad(loss, argnums=(0, 1)), *shapes, target="gpu-h100")
    kinds = {finding.kind for finding in report.findings}
    assert kinds & {"float32", "upcast"} == {kind}
    assert {b.layer for b in report.buffers if b.op == "tanh"} == {"scan(<lambda>)"}


def test_arguments_are_told_by_kind_and_dtype():
    """Case 21: in what the optimizer's state is kept, whatever the parameters are in."""
    given = {"w": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.zeros(64)}
    workload = jaxmem.Workload(
        lambda p, x: jnp.mean(jnp.tanh(x @ p["w"] + p["b"]) ** 2), given, jnp.ones((8, 64)), optax.adam(1e-3)
    )
    for dtype, want in (
        (None, {"bfloat16": 2 * 64 * 64 * 2, "float32": 2 * 64 * 4}),
        ("float32", {"float32": 2 * (64 * 64 + 64) * 4}),
    ):
        config = jaxmem.MemoryConfig(precision=jaxmem.Precision(optimizer=dtype))
        report = jaxmem.analyze(workload, config, target="cpu")
        kept = {(row.kind, row.dtype): row.size_bytes for row in report.argument_dtypes}
        assert {d: size for (kind, d), size in kept.items() if kind == "optimizer_state"} == {"int32": 4, **want}
        assert kept["parameters", "bfloat16"] == 64 * 64 * 2 and kept["batch", "float32"] == 8 * 64 * 4
        assert sum(kept.values()) == report.argument_bytes
        assert report.provenances["argument_dtypes"] == report.buffer_provenance
        found = dict(state_dtypes(report))
        assert found["optimizer state"].startswith(max(want, key=want.__getitem__))
        text = io.StringIO()
        print_report(report, rich.console.Console(file=text, width=120))
        assert found["optimizer state"] in text.getvalue() and found["optimizer state"] in html_report(report)
