import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jaxmem.analysis import Program, as_program, compare
from jaxmem.errors import InputError, RematWithoutEffect

from .programs import FORWARD, INPUTS, WEIGHTS, scanned

VARIANTS = {"full": jax.grad(scanned(remat=True)), "none": jax.grad(scanned(remat=False))}
# What a row of `compare --json` promises.
ROW = {
    "name",
    "target",
    "provenance",
    "peak_bytes",
    "argument_bytes",
    "output_bytes",
    "temp_bytes",
    "alias_bytes",
    "host_temp_bytes",
    "saved_residual_bytes",
    "forward_flops",
    "recompute_flops",
    "step_seconds",
    "fits",
    "warnings",
}


def program(name="p", **fields):
    return Program(name=name, lower=lambda: jax.jit(jnp.sin).lower(jnp.ones(3)), **fields)


def test_rows_come_in_the_order_asked_with_every_promised_field():
    table = compare(VARIANTS, WEIGHTS, INPUTS, target="cpu")
    written = json.loads(table.to_json())
    assert [row["name"] for row in written["rows"]] == ["full", "none"]
    assert all(row.keys() >= ROW for row in written["rows"])
    assert (written["target"], written["provenance"]) == ("cpu", "compiled")
    assert written["versions"]["jax"] == jax.__version__
    assert (table["full"].recompute_flops, table["none"].recompute_flops) == (FORWARD, 0)
    assert table["full"].temp_bytes < table["none"].temp_bytes
    with pytest.raises(KeyError):
        table["half"]


def test_progress_names_every_stage_and_tracing_comes_first():
    seen = []
    compare(VARIANTS, WEIGHTS, INPUTS, progress=lambda name, stage: seen.append((name, stage)))
    traced = [("full", "tracing"), ("none", "tracing")]
    assert seen == [*traced, *((name, stage) for name in VARIANTS for stage in ("compiling", "done"))]


def test_a_remat_setting_without_effect_stops_before_any_compile():
    def never():
        raise AssertionError("lowered")

    plain = program(saved_residual_bytes=100)
    dead = Program(name="q", lower=never, remat="dots", saved_residual_bytes=100, plain_residual_bytes=lambda: 100)
    with pytest.raises(RematWithoutEffect, match=r"remat='dots' to change what 'b' keeps .* got 100 bytes"):
        compare({"a": plain, "b": dead})


def test_a_remat_setting_with_an_effect_or_none_at_all_passes():
    fewer = program(remat="full", saved_residual_bytes=10, plain_residual_bytes=100)
    plain = program(saved_residual_bytes=100, plain_residual_bytes=100)
    unknown = program(remat="full", plain_residual_bytes=100)
    table = compare({"fewer": fewer, "plain": plain, "unknown": unknown})
    assert [row.saved_residual_bytes for row in table.rows] == [10, 100, None]
    assert [row.name for row in table.rows] == ["fewer", "plain", "unknown"]


def test_stages_that_are_lowered_or_compiled_already():
    lowered = jax.jit(VARIANTS["full"]).lower(WEIGHTS, INPUTS)
    table = compare({"lowered": lowered, "compiled": lowered.compile()})
    assert [(row.name, row.recompute_flops) for row in table.rows] == [("lowered", FORWARD), ("compiled", FORWARD)]


def test_other_packages_teach_compare_their_types():
    @dataclasses.dataclass(frozen=True)
    class Doubled:
        times: int

    @as_program.register
    def _(variant: Doubled, x, *, name, target):
        traced = jax.jit(lambda x: x @ x * variant.times).trace(x)
        return Program.from_traced(traced, name=name)

    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    row = compare({"twice": Doubled(2)}, square)["twice"]
    assert row.forward_flops == row.flops == 2 * 8**3


@pytest.mark.parametrize(
    ("variants", "args", "message"),
    [
        ({}, (), "at least one variant"),
        ([jnp.sin], (), "a mapping from names"),
        ({1: jnp.sin}, (), "a mapping from names"),
        ({"a": 3}, (), "got a int named 'a'"),
        ({"a": program()}, (1.0,), "no arguments beside the Program named 'a'"),
    ],
)
def test_bad_input_is_one_clear_error(variants, args, message):
    with pytest.raises(InputError, match=message):
        compare(variants, *args)
