import dataclasses
import json

import jax
import jax.numpy as jnp
import pytest

from jaxmem.analysis import Program, as_program, compare, join_comparisons
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
    with pytest.raises(RematWithoutEffect, match=r"remat='dots' to change what 'b' keeps .* got 100 B"):
        compare({"a": plain, "b": dead})


def refused_by_jax(w, x):
    return jnp.dot(w[0], jnp.ones(5)) + x.sum()


def test_a_variant_that_jax_refuses_costs_one_row():
    variants = {"jax": refused_by_jax, "user": lambda w, x: {}["missing"], "none": VARIANTS["none"], "arity": jnp.sin}
    table = compare(variants, WEIGHTS, INPUTS, target="cpu")
    assert [row.name for row in table.rows] == ["none"]
    why = dict(table.refused)
    assert list(why) == ["jax", "user", "arity"]
    assert why["jax"].startswith("refused. TypeError: dot_general") and "KeyError: 'missing'" in why["user"]
    assert "2 of them" in why["arity"] and "\n" not in "".join(why.values())
    said = " ".join(str(table).split())
    assert all(" ".join(f"{name}: {text}".split()) in said for name, text in table.refused)
    with pytest.raises(TypeError, match="dot_general"):  # the first one's, where there is no other row
        compare({"jax": refused_by_jax, "user": variants["user"]}, WEIGHTS, INPUTS, target="cpu")


def test_a_program_that_its_compiler_refuses_costs_one_row():
    table = compare({"p": program(), "typo": program(compiler_options={"xla_no_such_option": True})})
    assert [row.name for row in table.rows] == ["p"] and "xla_no_such_option" in dict(table.refused)["typo"]


def test_a_fault_of_jaxmem_is_no_row():
    def broken():
        exec(compile("{}['own']", compare.__code__.co_filename, "exec"))

    with pytest.raises(KeyError, match="own"):
        compare({"p": program(), "broken": program(modelled_flops=broken)})


def test_a_terminal_shows_what_a_comparison_is_at(capsys, monkeypatch):
    compare({"sin": jnp.sin}, 1.0)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    compare({"sin": jnp.sin, "cos": jnp.cos}, 1.0)
    shown = capsys.readouterr().err
    assert "2 of 2, compiling cos, 0 s" in shown
    assert shown.endswith("\r\x1b[1A\x1b[2K")  # the line is gone in the end


def test_a_setting_without_effect_may_cost_one_row_only():
    idle = program(remat="dots", saved_residual_bytes=100, plain_residual_bytes=100)
    plain = program(saved_residual_bytes=100)
    table = compare({"plain": plain, "idle": idle}, without_effect="refuse")
    assert [row.name for row in table.rows] == ["plain"] and table.without_effect == ("idle",)
    assert "100 B of residuals with and without it" in dict(table.refused)["idle"]
    both = join_comparisons([table, table])
    assert both.without_effect == ("idle on local", "idle on local")
    with pytest.raises(RematWithoutEffect):
        compare({"idle": idle}, without_effect="refuse")


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


def test_compare_is_given_what_makes_programs_of_other_types():
    @dataclasses.dataclass(frozen=True)
    class Doubled:
        times: int

    def make(variant, x, *, name, target):
        if not isinstance(variant, Doubled):
            return as_program(variant, x, name=name, target=target)
        traced = jax.jit(lambda x: x @ x * variant.times).trace(x)
        return Program.from_traced(traced, name=name)

    square = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    row = compare({"twice": Doubled(2), "sin": jnp.sin}, square, make=make)["twice"]
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
