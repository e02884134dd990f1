# ruff: noqa: E501
"""Origins on a small module written by hand: a loop that stacks values, passes some on, and copies others."""

import pytest

from jaxmem.analysis.attribution._origin import origin
from jaxmem.analysis.findings._invariants import is_loop_invariant
from jaxmem.analysis.hlo._parse import parse_hlo

pytestmark = pytest.mark.once

HLO = """
HloModule m, is_scheduled=true

%fused_update (p0: f32[4,8], p1: f32[8], p2: s32[]) -> f32[4,8] {
  %p0 = f32[4,8]{1,0} parameter(0)
  %p1 = f32[8]{0} parameter(1)
  %exp.1 = f32[8]{0} exponential(%p1), metadata={op_name="jit(f)/jvp(M)/while/body/closed_call/Dense_0/exp"}
  %row = f32[1,8]{1,0} reshape(%exp.1)
  %p2 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %dus.1 = f32[4,8]{1,0} dynamic-update-slice(%p0, %row, %p2, %zero.1), metadata={op_name="jit(f)/jvp(M)/while"}
}

%fused_zeros () -> f32[4,8] {
  %zero.2 = f32[] constant(0)
  ROOT %zeros.1 = f32[4,8]{1,0} broadcast(%zero.2), dimensions={}, metadata={op_name="jit(f)/jvp(M)/broadcast_in_dim"}
}

%body (state: (s32[], f32[8], f32[4,8], f32[8], f32[4,8])) -> (s32[], f32[8], f32[4,8], f32[8], f32[4,8]) {
  %state = (s32[], f32[8]{0}, f32[4,8]{1,0}, f32[8]{0}, f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[8]{0} get-tuple-element(%state), index=1
  %stack = f32[4,8]{1,0} get-tuple-element(%state), index=2
  %w = f32[8]{0} get-tuple-element(%state), index=3
  %stack2 = f32[4,8]{1,0} get-tuple-element(%state), index=4
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %y = f32[8]{0} multiply(%x, %w), metadata={op_name="jit(f)/jvp(M)/while/body/closed_call/Dense_0/mul"}
  %written = f32[4,8]{1,0} fusion(%stack, %y, %i), kind=kLoop, calls=%fused_update
  %same = f32[8]{0} negate(%w), metadata={op_name="jit(f)/jvp(M)/while/body/closed_call/Dense_0/neg"}
  %same_row = f32[1,8]{1,0} bitcast(%same)
  %zero = s32[] constant(0)
  %written2 = f32[4,8]{1,0} dynamic-update-slice(%stack2, %same_row, %i, %zero)
  ROOT %out = (s32[], f32[8]{0}, f32[4,8]{1,0}, f32[8]{0}, f32[4,8]{1,0}) tuple(%next, %y, %written, %w, %written2)
}

%cond (state.1: (s32[], f32[8], f32[4,8], f32[8], f32[4,8])) -> pred[] {
  %state.1 = (s32[], f32[8]{0}, f32[4,8]{1,0}, f32[8]{0}, f32[4,8]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %four = s32[] constant(4)
  ROOT %less = pred[] compare(%i.1, %four), direction=LT
}

ENTRY %main (a: f32[8], b: f32[8]) -> f32[4,8] {
  %a = f32[8]{0} parameter(0), metadata={op_name="params[\\'w\\']"}
  %b = f32[8]{0} parameter(1), metadata={op_name="x"}
  %a.copy = f32[8]{0} copy(%a)
  %start = s32[] constant(0)
  %empty = f32[4,8]{1,0} fusion(), kind=kLoop, calls=%fused_zeros
  %empty2 = f32[4,8]{1,0} broadcast(%start), dimensions={}
  %init = (s32[], f32[8]{0}, f32[4,8]{1,0}, f32[8]{0}, f32[4,8]{1,0}) tuple(%start, %b, %empty, %a.copy, %empty2)
  %loop = (s32[], f32[8]{0}, f32[4,8]{1,0}, f32[8]{0}, f32[4,8]{1,0}) while(%init), condition=%cond, body=%body, metadata={op_name="jit(f)/jvp(M)/while"}
  %stacked = f32[4,8]{1,0} get-tuple-element(%loop), index=2
  ROOT %sum = f32[4,8]{1,0} copy(%stacked)
}
"""


@pytest.fixture(scope="module")
def module():
    return parse_hlo(HLO)


CASES = {
    "a stack, as the loop's result": ("loop", (2,), "exp.1", True),
    "a stack, before the loop fills it": ("empty", (), "exp.1", True),
    "a stack, as the body writes it": ("written", (), "exp.1", True),
    "a stack, in the body's state": ("stack", (), "exp.1", True),
    "a copy of the result": ("sum", (), "exp.1", True),
    "the carry": ("loop", (1,), "y", False),
    "a value that the loop passes on, copied before": ("loop", (3,), "a", False),
    "a stack of slices without a scope of its own": ("loop", (4,), "same", True),
    "its buffer before the loop": ("empty2", (), "same", True),
    "a copy of an argument": ("a.copy", (), "a", False),
}


@pytest.mark.parametrize("case", CASES)
def test_origin(module, case):
    name, index, expected, stacked = CASES[case]
    found = origin(module, name, index)
    assert (found.instruction.name, found.stacked) == (expected, stacked)


def test_what_a_loop_computes_anew_and_what_not(module):
    assert is_loop_invariant(module, module.instruction("same"))
    assert not is_loop_invariant(module, module.instruction("y"))
    assert not is_loop_invariant(module, module.instruction("exp.1"))


def test_unknown_names_have_no_origin(module):
    assert origin(module, "nowhere") is None


def test_elements_that_the_text_writes_without_an_instruction():
    text = HLO.replace("copy(%stacked)", "copy(%loop#2)")
    found = origin(parse_hlo(text), "sum")
    assert (found.instruction.name, found.stacked) == ("exp.1", True)
