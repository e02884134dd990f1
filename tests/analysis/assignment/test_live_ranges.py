"""Live ranges from the HLO: by hand on a small loop, and against XLA:CPU's own on real programs."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jaxmem.analysis.assignment import liveness, read_text
from tests.analysis.assignment.programs import lower, program

# Six trips of `h = tanh(h) * w`, every h kept in `stack`; `w` comes out as it went in.
LOOP = """HloModule by_hand, is_scheduled=true, input_output_alias={ {0}: (0, {}, may-alias) }

%test (c: (s32[], f32[256], f32[6,256], f32[256])) -> pred[] {
  %c = (s32[], f32[256]{0}, f32[6,256]{1,0}, f32[256]{0}) parameter(0)
  %n = s32[] get-tuple-element(%c), index=0
  %six = s32[] constant(6)
  ROOT %less = pred[] compare(%n, %six), direction=LT
}

%body (b: (s32[], f32[256], f32[6,256], f32[256])) -> (s32[], f32[256], f32[6,256], f32[256]) {
  %b = (s32[], f32[256]{0}, f32[6,256]{1,0}, f32[256]{0}) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %h = f32[256]{0} get-tuple-element(%b), index=1
  %stack = f32[6,256]{1,0} get-tuple-element(%b), index=2
  %w = f32[256]{0} get-tuple-element(%b), index=3
  %row = f32[1,256]{1,0} bitcast(%h)
  %zero = s32[] constant(0)
  %stacked = f32[6,256]{1,0} dynamic-update-slice(%stack, %row, %i, %zero)
  %tanh = f32[256]{0} tanh(%h)
  %next = f32[256]{0} multiply(%tanh, %w)
  %one = s32[] constant(1)
  %j = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[256]{0}, f32[6,256]{1,0}, f32[256]{0}) tuple(%j, %next, %stacked, %w)
}

ENTRY %main (x: f32[256], w0: f32[256]) -> (f32[256], f32[6,256]) {
  %x = f32[256]{0} parameter(0)
  %w0 = f32[256]{0} parameter(1)
  %start = s32[] constant(0)
  %i0 = s32[] copy(%start)
  %h0 = f32[256]{0} copy(%x)
  %float0 = f32[] constant(0)
  %stack0 = f32[6,256]{1,0} broadcast(%float0), dimensions={}
  %in = (s32[], f32[256]{0}, f32[6,256]{1,0}, f32[256]{0}) tuple(%i0, %h0, %stack0, %w0)
  %loop = (s32[], f32[256]{0}, f32[6,256]{1,0}, f32[256]{0}) while(%in), condition=%test, body=%body
  %last = f32[256]{0} get-tuple-element(%loop), index=1
  %all = f32[6,256]{1,0} get-tuple-element(%loop), index=2
  %y = f32[256]{0} add(%last, %x)
  ROOT %result = (f32[256]{0}, f32[6,256]{1,0}) tuple(%y, %all)
}
"""
# 0 x  1 w0  2 start  3 i0  4 h0  5 float0  6 stack0  7 in | 8 c  9 n  10 six  11 less
# | 12 b  13 i  14 h  15 stack  16 w  17 row  18 zero  19 stacked  20 tanh  21 next  22 one  23 j  24 out
# | 25 loop  26 last  27 all  28 y  29 result


def test_a_loop_by_hand():
    assignment = liveness(LOOP)
    assert len(assignment.schedule) == 30
    assert assignment.schedule[25] == "loop"
    ranges = {(v.name, v.index): (v.start, v.end) for a in assignment.allocations for v in a.values}
    assert ranges["x", ()] == (0, 28)  # until `y`, its last use, takes its place
    assert ranges["y", ()] == (28, 29)
    assert ranges["w0", ()] == (
        0,
        29,
    )  # the caller keeps it; the loop passes it on, so it has no value of its own there
    assert ("b", (3,)) not in ranges and ("loop", (3,)) not in ranges
    assert ranges["stack0", ()] == (6, 8)
    assert ranges["c", (2,)] == (8, 12)
    assert ranges["b", (2,)] == (12, 19)
    assert ranges["stacked", ()] == (19, 25)
    assert ranges["loop", (2,)] == (25, 29)
    assert ranges["b", (1,)] == (12, 20)  # last read by tanh
    assert ranges["tanh", ()] == (20, 21)
    assert ranges["next", ()] == (21, 25)


def test_the_same_bytes_through_a_loop_have_one_place():
    assignment = liveness(LOOP)
    places = {(v.name, v.index): (v.allocation, v.offset_bytes) for a in assignment.allocations for v in a.values}
    stack = {places[key] for key in [("stack0", ()), ("c", (2,)), ("b", (2,)), ("stacked", ()), ("loop", (2,))]}
    ((number, offset),) = stack
    assert offset == 0
    (allocation,) = (a for a in assignment.allocations if a.number == number)
    assert (allocation.kind, allocation.size_bytes) == ("output", 6 * 256 * 4)
    (donated,) = (a for a in assignment.allocations if a.parameter == 0)
    assert donated.live_out and [v.name for v in donated.values] == ["x", "y"]
    # h and tanh(h), while one is made from the other; counters lie where the pointers to the results will be.
    assert assignment.temp_sweep.peak_bytes == 2 * 1024


def test_text_that_is_not_scheduled_is_refused():
    with pytest.raises(ValueError, match="is_scheduled"):
        liveness(LOOP.replace("is_scheduled=true, ", ""))


def _branch(x, i):
    return jax.lax.cond(i > 2, lambda x: jnp.sin(x) @ x, lambda x: x * 2, x).sum()


def _nested(x):
    def inner(c, _):
        return jnp.tanh(c @ c), c

    def outer(c, _):
        c, kept = jax.lax.scan(inner, c, None, length=3)
        return c, kept.sum(0)

    c, kept = jax.lax.scan(outer, x, None, length=4)
    return c.sum() + kept.sum()


def _random_and_sorted(x):
    return jnp.sort(x, axis=0)[:10], jax.random.normal(jax.random.key(0), x.shape)


X = jax.ShapeDtypeStruct((64, 64), jnp.float32)
PROGRAMS = {
    "branch": (jax.grad(_branch), (X, jax.ShapeDtypeStruct((), jnp.int32))),
    "nested": (jax.grad(_nested), (X,)),
    "random": (_random_and_sorted, (X,)),
}


@pytest.mark.parametrize("name", [*PROGRAMS, "step"])
def test_ranges_are_those_of_the_compiler(name, tmp_path: Path):
    if name == "step":
        lowered, options = lower("cpu", *program("cpu"))
    else:
        lowered, options = jax.jit(PROGRAMS[name][0]).lower(*PROGRAMS[name][1]), {}
    compiled = lowered.compile(compiler_options=options | {"xla_dump_to": str(tmp_path)})
    buffers = max(tmp_path.glob("*-buffer-assignment.txt"), key=lambda path: path.stat().st_size)
    ranges = buffers.with_name(buffers.name.replace("buffer-assignment", "live-range"))
    dumped = read_text(buffers.read_text(), ranges.read_text())
    own = liveness(compiled.as_text(), platform="cpu")
    assert own.schedule == dumped.schedule
    wanted, got = (
        {(v.name, v.index): (v.start, v.end, v.size_bytes) for a in each.allocations for v in a.values if v.start >= 0}
        for each in (dumped, own)
    )
    assert got == wanted
    # The estimate's places are its own; its bytes come near.
    assert own.temp_sweep.peak_bytes == pytest.approx(dumped.temp_sweep.peak_bytes, rel=0.1)
