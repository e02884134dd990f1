"""On a TPU the compiler's own cycles count, and what has none is filled."""

import dataclasses

import pytest

from jaxmem.analysis.step_time import ChipSpeed, step_time
from jaxmem.targets import find_chip
from tests.analysis.step_time.programs import CHIP, DOT, DOT_SECONDS, SQUARE, computation, cycles, module

pytestmark = pytest.mark.once

COPY = f"({SQUARE.replace('0}', '0:S(1)}')}, {SQUARE}, u32[]{{:S(2)}})"


def test_cycles_over_the_clock_rate():
    time = step_time(module(f"ROOT %n = {SQUARE} negate(%x){cycles(5000)}"), CHIP)
    assert (time.seconds, time.filled_share, time.method) == (5e-6, 0, "compiler_cycles")
    assert time.memory_seconds == time.seconds  # of one flop and eight bytes an element


def test_what_has_no_cycles_is_filled_and_the_share_is_told():
    sentinel = cycles(9223372036854775807)  # the compiler's "unknown"
    for end in ("", sentinel):
        time = step_time(
            module(f"%n = {SQUARE} negate(%x){cycles(6_000_000)}\nROOT %d = {SQUARE} {DOT.format('%n')}{end}"), CHIP
        )
        assert time.seconds == pytest.approx(6e-3 + DOT_SECONDS)
        assert time.filled_share == pytest.approx(0.25)


def test_without_a_clock_rate_all_is_roofline():
    chip = dataclasses.replace(CHIP, clock_hertz=None)
    time = step_time(module(f"ROOT %d = {SQUARE} {DOT.format('%x')}{cycles(5)}"), chip)
    assert (time.seconds, time.method) == (pytest.approx(DOT_SECONDS), "roofline")


def test_what_is_inside_a_fusion_does_not_count_again():
    fused = computation("fused", f"ROOT %n = {SQUARE} negate(%p){cycles(10**9)}")
    text = module(f"ROOT %f = {SQUARE} fusion(%x), kind=kLoop, calls=%fused{cycles(1000)}", others=fused)
    assert step_time(text, CHIP).seconds == pytest.approx(1e-6)


def test_a_loop_is_multiplied_by_the_constant_in_its_condition():
    state = "(s32[])"
    body = computation(
        "body",
        f"%i = s32[] get-tuple-element(%p), index=0\n%one = s32[] constant(1)\n%j = s32[] add(%i, %one){cycles(100)}\n"
        f"ROOT %t = {state} tuple(%j)",
        state,
    )
    condition = computation(
        "condition",
        "%i = s32[] get-tuple-element(%p), index=0\n%n = s32[] constant(7)\n"
        f"ROOT %l = pred[] compare(%i, %n), direction=LT{cycles(10)}",
        state,
    )
    entry = (
        f"%z = s32[] constant(0)\n%t = {state} tuple(%z)\nROOT %w = {state} while(%t), condition=%condition, body=%body"
    )
    assert step_time(module(entry, others=body + condition), CHIP).seconds == pytest.approx(7 * 110e-9)


@pytest.mark.parametrize(("between", "exposed"), [(0, 4e-5), (10_000, 3e-5), (100_000, 0)])
def test_an_asynchronous_copy_costs_what_is_not_hidden(between, exposed):
    """4 MB from HBM take 40 microseconds."""
    work = f"%n = {SQUARE} negate(%x){cycles(between)}\n"
    text = module(f"%s = {COPY} copy-start(%x)\n{work}ROOT %d = {SQUARE} copy-done(%s)")
    time = step_time(text, CHIP)
    assert time.seconds == pytest.approx(between / 1e9 + exposed)
    assert time.filled_share == pytest.approx(exposed / time.seconds)


def test_two_copies_share_the_bandwidth():
    starts = f"%a = {COPY} copy-start(%x)\n%b = {COPY} copy-start(%x)\n"
    text = module(f"{starts}%c = {SQUARE} copy-done(%a)\nROOT %d = {SQUARE} copy-done(%b)")
    assert step_time(text, CHIP).seconds == pytest.approx(8e-5)


def test_a_copy_to_the_host_goes_over_its_link():
    host = COPY.replace("S(1)", "S(5)")
    time = step_time(module(f"%s = {host} copy-start(%x)\nROOT %d = {SQUARE} copy-done(%s)"), CHIP)
    assert time.seconds == pytest.approx(4e6 / 1e10)
    chip = dataclasses.replace(CHIP, host_bytes_per_second=None)
    unknown = step_time(module(f"%s = {host} copy-start(%x)\nROOT %d = {SQUARE} copy-done(%s)"), chip)
    assert unknown.seconds == pytest.approx(4e6 / 1e11) and "host" in " ".join(unknown.notes)


@pytest.mark.parametrize(
    ("instruction", "sent"),
    [
        ("f32[1000,1000] all-reduce(%x), replica_groups={{0,1,2,3}}, to_apply=%add", 2 * 3 / 4 * 4e6),
        ("f32[1000,1000] all-reduce(%x), replica_groups=[2,4]<=[8], to_apply=%add", 2 * 3 / 4 * 4e6),
        ("f32[1000,1000] all-reduce(%x), replica_groups={}, to_apply=%add", 2 * 7 / 8 * 4e6),  # all eight
        ("f32[4000,1000] all-gather(%x), replica_groups={{0,1,2,3}}", 3 / 4 * 16e6),
        ("f32[250,1000] reduce-scatter(%x), replica_groups={{0,1,2,3}}, to_apply=%add", 3 / 4 * 4e6),
        ("f32[1000,1000] all-to-all(%x), replica_groups={{0,1}}", 1 / 2 * 4e6),
        ("f32[1000,1000] collective-permute(%x), source_target_pairs={{0,1}}", 4e6),
    ],
)
def test_collectives_by_the_ring_algorithms(instruction, sent):
    time = step_time(module(f"ROOT %c = {instruction}", header=", num_partitions=8"), CHIP)
    assert time.seconds == time.collective_seconds == pytest.approx(sent / 1e10)


def test_a_collective_in_the_background_is_hidden_too():
    gather = "(f32[1000,1000], f32[4000,1000]) all-gather-start(%x), replica_groups={{0,1,2,3}}"
    for between, exposed in ((0, 1.2e-3), (200_000, 1e-3), (2_000_000, 0)):
        work = f"%n = {SQUARE} negate(%x){cycles(between)}\n"
        text = module(f"%s = {gather}\n{work}ROOT %d = f32[4000,1000] all-gather-done(%s)")
        assert step_time(text, CHIP).collective_seconds == pytest.approx(exposed, abs=1e-12)


def test_an_unknown_interconnect_is_noted():
    chip = dataclasses.replace(CHIP, interconnect_bytes_per_second=None)
    time = step_time(module("ROOT %c = f32[1000,1000] all-reduce(%x), replica_groups={{0,1}}"), chip)
    assert time.seconds == 0 and "collectives" in " ".join(time.notes)


def test_the_rates_of_a_row_of_the_chip_table():
    tpu, gpu = ChipSpeed.of(find_chip("tpu-v5e")), ChipSpeed.of(find_chip("gpu-t4"))
    assert (tpu.clock_hertz, tpu.vector_flops_per_second) == (1.5e9, None)
    assert (gpu.clock_hertz, gpu.vector_flops_per_second) == (None, 8.1e12)
    assert [tpu.matmul_rate(dtype, exact=False) for dtype in ("bf16", "f32", "s8")] == [197e12, 197e12, 393e12]
    assert [gpu.matmul_rate(dtype, exact=False) for dtype in ("bf16", "f32", "f16")] == [8.1e12, 8.1e12, 65e12]
