"""What cures come to, in findings: compiled numbers, and no cure that a compile shows to be worse."""

import dataclasses

import jax.numpy as jnp
import optax

from jaxmem import MemoryConfig, Workload, analyze, cured, try_cures
from jaxmem.analysis import Buffer, Comparison, Finding, MemoryReport
from jaxmem.analysis._asked import asked_of
from jaxmem.analysis.findings._waiting import waiting_gradients
from jaxmem.analysis.hlo._parse import parse_hlo
from jaxmem.targets import resolve_target

GIB = 2**30
CONFIG = MemoryConfig(remat="full")


def _row(name, gib, seconds, compiling=4.0):
    numbers = {"peak_bytes": int(gib * GIB), "step_seconds": seconds, "compile_seconds": compiling}
    told = {"target": "tpu-v5e", "backend": "tpu", "jax_version": "0", "fits": "yes", "fits_reason": ""}
    return MemoryReport(name=name, config=CONFIG.to_json(), **told, **numbers)


def _finding(kind, *changes):
    configs = tuple(dataclasses.replace(CONFIG, **change).to_json() for change in changes)
    return Finding(kind=kind, size_bytes=GIB, title=kind, cure="Do it.", configs=configs)


def test_a_cure_that_harms_is_not_given():
    """GPT-2 with dropout and full remat on a v5e, as its compiler has it: 16 bits take six times the bytes."""
    found = (
        _finding("float32", {"precision": "bfloat16"}),
        _finding("random_bits", {"random": "fenced"}, {"generator": "rbg"}),
        _finding("unrolled", {"roll": True}),
        _finding("refused", {"remat": "dots"}),
        _finding("untried", {"accumulation_steps": 2}),
        Finding(kind="words", size_bytes=0, title="", cure="Think."),
    )
    before = dataclasses.replace(_row("step", 2.17, 0.312), findings=found)
    rows = (
        _row("precision=bfloat16", 12.42, 1.022),
        _row("random=fenced", 1.95, 0.25),
        _row("generator=rbg", 2.17, 0.312),
        _row("roll=True", 2.175, 0.313, compiling=2.0),
    )
    table = Comparison(rows=(before, *rows), target="tpu-v5e", refused=(("remat=dots", "No names."),))
    after = cured(before, table)
    assert [f.kind for f in after.findings] == ["random_bits", "unrolled", "untried", "words"]
    assert after.notes == (
        "Not advised, as a compile shows no gain: precision=bfloat16 +10.25 GiB, +228% time; remat=dots is refused.",
    )
    bits, roll, untried, words = (finding.proof for finding in after.findings)
    assert bits == "Compiled: random=fenced −225.3 MiB, −20% time. No help: generator=rbg same peak, same time."
    assert roll == "Compiled: roll=True same peak, same time, compile × 0.5."
    assert untried.startswith("Not compiled") and words == ""
    assert MemoryReport.from_dict(after.to_dict()) == after


def _mlp(layers=6):
    def loss(params, x):
        for w in params:
            x = jnp.sin(jnp.tanh(x @ w))
        return jnp.mean(x**2)

    return Workload(loss, [jnp.ones((64, 64))] * layers, jnp.ones((512, 64)), optax.sgd(0.1))


def test_numbers_are_those_of_the_compiler():
    report = analyze(_mlp(), target="cpu")
    assert any(f.kind == "unrolled" and f.title.startswith("6 equal layers are unrolled") for f in report.findings)
    assert not any(f.kind == "unrolled" for f in analyze(_mlp(), MemoryConfig(roll=False), target="cpu").findings)
    table = try_cures(_mlp(), target="cpu", report=report)
    after = cured(report, table)
    kept = next(finding for finding in after.findings if finding.kind == "residuals")
    full = next(each for each in kept.tried if each.name == "remat=full")
    assert full.helps and full.peak_bytes == table["remat=full"].peak_bytes < report.peak_bytes
    assert "Compiled: remat=full −" in kept.proof and "Compiled: remat=full −" in str(after)
    assert try_cures(_mlp(), target="cpu", report=report, within_seconds=0.0).rows[1:] == ()


def test_weight_gradients_that_wait_are_found():
    """A program made by hand: what the gradient of `w` is made of lies at the peak, which needs none of it."""
    scope = 'metadata={op_name="jit(step)/transpose(jvp(M))/%s"}'
    module = parse_hlo(
        f"""HloModule step, is_scheduled=true

ENTRY %main (w: f32[64,32], x: f32[4096,64]) -> (f32[64,32], f32[4096,64]) {{
  %w = f32[64,32]{{1,0}} parameter(0)
  %x = f32[4096,64]{{1,0}} parameter(1)
  %g = f32[4096,32]{{1,0}} dot(%x, %w), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}, {scope % "mul"}
  %peak = f32[4096,64]{{1,0}} sine(%x), {scope % "sin"}
  %late = f32[64,32]{{1,0}} dot(%x, %g), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}, {scope % "dot_general"}
  ROOT %out = (f32[64,32]{{1,0}}, f32[4096,64]{{1,0}}) tuple(%late, %peak)
}}
"""
    )
    schedule = ["w", "x", "g", "peak", "late", "out"]
    make = lambda name, kind, shape, start, end: Buffer(  # noqa: E731
        name=name, kind=kind, shape=shape, layout=shape, phase="backward", size_bytes=2**19, start=start, end=end
    )
    weight = make("w", "parameters", "f32[64,32]", 0, 5)
    waits, peak = make("g", "activations", "f32[4096,32]", 2, 4), make("peak", "activations", "f32[4096,64]", 3, 5)
    asked = asked_of(resolve_target("gpu-h100"), config=MemoryConfig())
    (finding,) = waiting_gradients([weight, waits, peak], module, schedule, asked)
    assert finding.size_bytes == 2**19 - 64 * 32 * 4 and finding.title.startswith("a weight gradient waits")
    assert MemoryConfig.from_json(finding.configs[0]).order == "tied" and "--order tied" in finding.shell
    # One that is not ready by then does not wait, and what is tied already needs no tie.
    assert waiting_gradients([weight, waits, dataclasses.replace(peak, start=2)], module, schedule, asked) == []
    tied = dataclasses.replace(asked, config=MemoryConfig(order="tied"))
    assert waiting_gradients([weight, waits, peak], module, schedule, tied) == []
