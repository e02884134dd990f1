"""Cures: budgets from the peak at hand, the chip's own dtype, no saving that is not proven, good news apart."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.analysis._cures import (
    asked_of,
    fitting_steps,
    in_shell,
    micro_batches,
    recompute,
    sensible_budget,
)
from jaxmem.analysis._draws import how_it_draws
from jaxmem.analysis._records import Buffer
from jaxmem.analysis.findings._buffers import draws, random_bits, small_share
from jaxmem.analysis.findings._wide import wide
from jaxmem.analysis.hlo._parse import parse_hlo
from jaxmem.budget import parse_budget
from jaxmem.targets import resolve_target

GIB = 2**30
H100, T4, V5E = (resolve_target(name) for name in ("gpu-h100", "gpu-t4", "tpu-v5e"))
PLAIN = jaxmem.MemoryConfig()


def layers(params, batch, *, memory, rng):
    x = batch.astype(memory.compute_dtype)
    for w in params:
        x = memory.block(lambda w, x: jnp.tanh(jax.nn.gelu(x @ w)))(w.astype(x.dtype), x)
    return jnp.mean(x * jax.random.bernoulli(rng, 0.9, x.shape))


def workload(rows=2048):
    params = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 4
    return jaxmem.Workload(layers, params, jax.ShapeDtypeStruct((rows, 128), jnp.float32), optax.sgd(0.1))


def asked(target=H100, peak=20 * GIB, **known):
    return asked_of(target, **{"config": PLAIN, "peak_bytes": peak, "capacity_bytes": target.memory_bytes, **known})


def test_a_budget_fits_the_device_or_halves_what_is_kept():
    for target, peak, kept in ((V5E, 20 * GIB, 18 * GIB), (H100, 20 * GIB, 18 * GIB), (T4, 30 * GIB, 25 * GIB)):
        bound = parse_budget(sensible_budget(asked(target, peak), kept)).bytes
        assert peak - kept < bound < peak and bound <= 0.95 * target.memory_bytes
    assert sensible_budget(asked(V5E, 40 * GIB), 10 * GIB) is None  # nothing that is kept can be what is too much


def test_recomputation_is_not_advised_where_it_is_done():
    cure = recompute(asked(rows=32), 18 * GIB)
    assert '"full"' in cure.python and "accumulation_steps=2" in cure.python
    assert "`jaxmem compare FILE --target gpu-h100 --remat none,full,dots,auto:11.0GiB`" in cure.shell
    done = recompute(asked(rows=32, config=jaxmem.MemoryConfig(remat="full")), 18 * GIB)
    assert "Remat" not in done.python and done.python == "MemoryConfig(accumulation_steps=2) shrinks them, too."
    only = recompute(asked(V5E, 40 * GIB), 10 * GIB)
    assert "That alone cannot make it fit" in only.python and "auto:" not in only.python
    assert "jaxmem.remat.auto(loss, " in recompute(asked(config=None), 2 * GIB).python


@pytest.mark.parametrize(
    ("rows", "now", "missing", "want"), [(32, 1, 0, 2), (32, 2, 0, 4), (30, 1, 9, 10), (1, 1, 5, None)]
)
def test_micro_batches_divide_the_rows_and_save_what_is_missing(rows, now, missing, want):
    steps = fitting_steps(missing, 10, rows, now)
    assert steps == want
    assert steps is None or rows % steps == 0
    config = jaxmem.MemoryConfig(accumulation_steps=now)
    assert micro_batches(asked(config=config, rows=1), GIB).python == ""


@pytest.mark.parametrize(
    ("target", "dtype"), [("gpu-t4", "float16"), ("gpu-v100", "float16"), ("gpu-a100-40g", "bfloat16")]
)
def test_16_bits_are_those_that_the_chip_has_units_for(target, dtype):
    report = jaxmem.analyze(workload(), target=target)
    (finding,) = [f for f in report.findings if f.kind == "float32"]
    assert f'precision="{dtype}"' in finding.cure and f"--target {target} --precision {dtype}`" in finding.shell
    again = jaxmem.analyze(workload(), jaxmem.MemoryConfig(precision=dtype), target=target)
    assert again.peak_bytes < report.peak_bytes


def test_no_saving_is_claimed_where_a_tpu_may_undo_recomputation():
    text = jax.jit(lambda key, x: x * jax.random.bernoulli(key, 0.5, x.shape)).lower(jax.random.key(0), jnp.ones(8))
    module = parse_hlo(text.compile().as_text())
    assert draws(module)
    kept = [Buffer(name="a", kind="activations", shape="f32[1024]", layout="f32[1024]", size_bytes=4096)]
    for target, remat, fenced, claimed in (
        (V5E, "full", False, 0),
        (V5E, "full", True, 0),
        (V5E, "none", False, 2048),
        (H100, "full", False, 2048),
    ):
        config = jaxmem.MemoryConfig(remat=remat)
        known = asked(target, config=config, draws=True, recomputes=remat == "full", fenced=fenced)
        (finding,) = wide(kept, module, known)
        assert finding.size_bytes == claimed
        harms = claimed == 0 and not fenced
        assert ("may cost bytes" in finding.cure) == ("may cost bytes" in finding.shell) == harms
        (proposed,) = map(jaxmem.MemoryConfig.from_json, finding.configs)
        assert proposed == jaxmem.MemoryConfig(
            remat=remat, precision="bfloat16", random="fenced" if harms else config.random
        )
    full = jaxmem.MemoryConfig(remat="full")
    (finding,) = wide(kept, module, asked(V5E, config=full, draws=True, recomputes=True, by_hardware=True))
    assert finding.size_bytes == 0 and finding.cure.startswith("Compute in 16 bits")


def test_random_bits_are_cured_by_what_is_not_there_yet():
    bits = [Buffer(name="a", kind="activations", shape="u32[1024]", size_bytes=4096, op_name="jit(f)/random_bits")]

    def proposed(target=V5E, **known):
        return [
            {field: getattr(jaxmem.MemoryConfig.from_json(text), field) for field in ("random", "generator")}
            for finding in random_bits(bits, asked(target, **known))
            for text in finding.configs
        ]

    fence, rbg = {"random": "fenced", "generator": "given"}, {"random": "auto", "generator": "rbg"}
    assert proposed() == [fence, rbg]
    assert proposed(fenced=True) == proposed(H100) == [rbg]  # on a GPU fences were never seen to save bytes
    assert proposed(by_hardware=True) == [fence]
    assert proposed(by_hardware=True, fenced=True) == []
    (finding,) = random_bits(bits, asked(V5E))
    assert "Not compiled" in finding.proof and "--random fenced`, the same numbers" in finding.shell
    (finding,) = random_bits(bits, asked(V5E, config=None))
    assert (
        all(words in finding.cure for words in ("optimization_barrier", "'rbg'", "Not compiled"))
        and not finding.configs
    )
    assert random_bits([], asked(V5E)) == []


def test_a_program_tells_how_it_draws():
    def draw(impl, fence):
        fn = jax.jit(lambda key: fence(jax.random.bernoulli(key, shape=(8,))))
        return how_it_draws(jax.make_jaxpr(fn)(jax.random.key(0, impl=impl)))

    assert draw("rbg", jax.lax.optimization_barrier) == {"fenced": True, "by_hardware": True}
    assert draw("threefry2x32", lambda mask: mask) == {"fenced": False, "by_hardware": False}
    assert how_it_draws(None) == {}


def test_a_larger_share_of_the_gpu_is_a_cure_where_it_is_enough():
    hbm = T4.chip.hbm_bytes
    (finding,) = small_share(asked(T4, int(0.85 * hbm)))
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.95" in finding.cure and "jaxmem analyze FILE" in finding.shell
    assert small_share(asked(T4, int(0.98 * hbm))) == small_share(asked(T4, int(0.5 * hbm))) == []


def test_every_cure_of_a_report_is_a_command_for_the_users_file():
    report = jaxmem.analyze(workload(), target="gpu-h100")
    cured = in_shell(report.findings, "net.py:big", [("--set", "rows=2048"), ("--precision", "float32")])
    assert {f.kind for f in cured} >= {"residuals", "float32"}
    assert all("FILE" not in f.cure and not f.shell for f in cured)
    commands = {f.kind: f.cure for f in cured}
    assert (
        "`jaxmem compare net.py:big --set rows=2048 --precision float32 --target gpu-h100 --remat"
        in commands["residuals"]
    )
    assert "`jaxmem analyze net.py:big --set rows=2048 --target gpu-h100 --precision bfloat16`" in commands["float32"]


def test_good_news_is_no_warning():
    report = jaxmem.analyze(workload(), jaxmem.MemoryConfig(accumulation_steps=4, remat="full"), target="gpu-h100")
    assert any("in place for 4 of 4 parameters" in note for note in report.notes)
    assert not any("in place" in warning for warning in report.warnings)
    assert jaxmem.MemoryReport.from_dict(report.to_dict()) == report


def test_a_target_of_several_devices_that_nothing_is_sharded_over_says_what_to_write():
    whole = workload()
    report = jaxmem.analyze(whole, target="gpu-h100:1x1x4")
    (note,) = [warning for warning in report.warnings if "replicated" in warning]
    line = note.partition("Shard the batch: batch = ")[2].partition(". The command line")[0]
    where = note.rpartition("in Python it is ")[2].rstrip(".")
    mesh = eval(where, {"jaxmem": jaxmem})
    sharded = dataclasses.replace(whole, batch=eval(line, {"jax": jax, "mesh": mesh, "batch": whole.batch}))
    again = jaxmem.analyze(sharded, target="gpu-h100:1x1x4")
    assert not any("replicated" in warning for warning in again.warnings)
    assert 4 * dict(again.by_kind)["batch"] == dict(report.by_kind)["batch"] == 4 * 2048 * 128
