"""Seconds of a compiled forward pass by the FLOPs of its products, which rates of budgets are fitted to."""

import pytest

from jaxmem.analysis.hlo._parse import parse_hlo
from jaxmem.analysis.step_time import forward_seconds
from jaxmem.targets import find_chip
from tests.analysis.step_time.programs import CHIP, DOT, SQUARE, computation, cycles, module

pytestmark = pytest.mark.once

FLOPS = 2 * 1000**3


def scoped(scope: str, name: str = "dot_general") -> str:
    return f', metadata={{op_name="jit(step)/{scope}/{name}"}}'


def of(*lines: str, others: str = "") -> tuple:
    return forward_seconds(parse_hlo(module("\n".join(lines), others=others)), CHIP)


def test_products_of_equal_flops_have_their_mean_and_all_else_its_sum():
    fused = computation("fused", f"ROOT %d = {SQUARE} {DOT.format('%p')}{scoped('jvp()')}")
    found = of(
        f"%a = {SQUARE} fusion(%x), kind=kOutput, calls=%fused{scoped('jvp()')}{cycles(1000)}",
        f"%b = {SQUARE} {DOT.format('%a')}{scoped('jvp(layer)')}{cycles(3000)}",
        f"%c = {SQUARE} negate(%b){scoped('jvp()', 'neg')}{cycles(500)}",
        f"ROOT %d = {SQUARE} exponential(%c){scoped('jvp()', 'exp')}{cycles(700)}",
        others=fused,
    )
    assert dict(found) == {0: pytest.approx(1.2e-6), FLOPS: pytest.approx(2e-6)}


def test_the_backward_pass_the_optimizer_and_what_is_kept_do_not_count():
    found = of(
        f"%a = {SQUARE} {DOT.format('%x')}{scoped('jvp()')}{cycles(1000)}",
        f"%b = {SQUARE} {DOT.format('%a')}{scoped('transpose(jvp())')}{cycles(9000)}",
        f"%c = {SQUARE} {DOT.format('%b')}{scoped('transpose(jvp())/rematted_computation')}{cycles(9000)}",
        f"%d = {SQUARE} negate(%c){scoped('jvp()/while/body', 'dynamic_update_slice')}{cycles(9000)}",
        f"ROOT %e = {SQUARE} negate(%d){scoped('optimizer_update', 'neg')}{cycles(9000)}",
    )
    assert dict(found) == {0: 0, FLOPS: pytest.approx(1e-6)}


def test_a_compiler_without_cycles_tells_nothing():
    text = module(f"ROOT %a = {SQUARE} {DOT.format('%x')}{scoped('jvp()')}")
    assert forward_seconds(parse_hlo(text), find_chip("gpu-h100")) == ()
    assert forward_seconds(parse_hlo(text), CHIP) == ()
