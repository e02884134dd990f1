"""Each instruction takes the larger of its arithmetic and its bytes; worked out by hand."""

import pytest

from jaxmem.analysis.step_time import NOMINAL_CPU, step_time
from tests.analysis.step_time.programs import CHIP, DOT, DOT_SECONDS, SQUARE, computation, module

pytestmark = pytest.mark.once


def seconds(text: str) -> float:
    return step_time(text, CHIP).seconds


def test_a_product_is_bound_by_its_flops():
    time = step_time(module(f"ROOT %d = {SQUARE} {DOT.format('%x')}"), CHIP)
    assert time.seconds == time.compute_seconds == pytest.approx(DOT_SECONDS)
    assert (time.memory_seconds, time.method, time.filled_share) == (0, "roofline", 1)


@pytest.mark.parametrize(
    ("dtype", "precision", "rate"),
    [("f32", "highest", 1e12), ("f32", "default", 1.5e12), ("bf16", "default", 2e12), ("s8", "default", 4e12)],
)
def test_the_rate_is_that_of_the_operands_dtype(dtype, precision, rate):
    square = f"{dtype}[4000,4000]{{1,0}}"
    product = DOT.format("%y").replace("highest", precision)
    text = module(f"%y = {square} bitcast(%x)\nROOT %d = {square} {product}")
    assert seconds(text) == pytest.approx(2 * 4000**3 / rate)


def test_a_fusion_is_bound_by_what_it_reads_and_writes():
    fused = computation("fused", f"%a = {SQUARE} add(%p, %p)\nROOT %t = {SQUARE} tanh(%a)")
    time = step_time(module(f"ROOT %f = {SQUARE} fusion(%x), kind=kLoop, calls=%fused", others=fused), CHIP)
    assert time.seconds == time.memory_seconds == pytest.approx(8e6 / 1e11)  # 4 MB each way; 2e6 FLOPs are 0.02 ms


def test_many_elementwise_operations_outweigh_the_bytes():
    lines = "\n".join(f"%a{i} = {SQUARE} add({f'%a{i - 1}' if i else '%p'}, %p)" for i in range(20))
    fused = computation("fused", f"{lines}\nROOT %t = {SQUARE} tanh(%a19)")
    time = step_time(module(f"ROOT %f = {SQUARE} fusion(%x), kind=kLoop, calls=%fused", others=fused), CHIP)
    assert time.seconds == time.compute_seconds == pytest.approx(21e6 / 1e11)


def test_of_a_slice_only_the_slice_is_read():
    row = "f32[1,1000]{1,0}"
    fused = computation("fused", f"%i = s32[] constant(0)\nROOT %s = {row} dynamic-slice(%p, %i, %i)")
    text = module(f"ROOT %f = {row} fusion(%x), kind=kLoop, calls=%fused", others=fused)
    assert seconds(text) == pytest.approx(8e3 / 1e11)
    assert seconds(module(f"ROOT %s = {row} slice(%x), slice={{[0:1], [0:1000]}}")) == pytest.approx(8e3 / 1e11)


def test_of_an_update_in_place_only_the_update_is_written():
    row = "f32[1,1000]{1,0}"
    fused = computation(
        "fused", f"%i = s32[] constant(0)\n%q = {row} parameter(1)\nROOT %u = {SQUARE} dynamic-update-slice(%p, %q, %i)"
    )
    text = module(f"%r = {row} constant(0)\nROOT %f = {SQUARE} fusion(%x, %r), kind=kLoop, calls=%fused", others=fused)
    assert seconds(text) == pytest.approx(8e3 / 1e11)


def test_a_fusion_that_slices_and_also_reads_all_reads_all():
    row = "f32[1,1000]{1,0}"
    fused = computation(
        "fused",
        f"%i = s32[] constant(0)\n%s = {row} dynamic-slice(%p, %i, %i)\n%n = {SQUARE} negate(%p)\n"
        f"ROOT %t = ({row}, {SQUARE}) tuple(%s, %n)",
    )
    text = module(f"ROOT %f = ({row}, {SQUARE}) fusion(%x), kind=kLoop, calls=%fused", others=fused)
    assert seconds(text) == pytest.approx((4e6 + 4e6 + 4e3) / 1e11)


def test_loops_multiply_and_so_do_loops_in_loops():
    state = f"({SQUARE})"
    inner = computation(
        "inner",
        f"%a = {SQUARE} get-tuple-element(%p), index=0\n%d = {SQUARE} {DOT.format('%a')}\nROOT %t = {state} tuple(%d)",
        state,
    )
    body = computation("outer", f"ROOT %w = {state} while(%p), condition=%c, body=%inner, {_trips(3)}", state)
    entry = f"%t = {state} tuple(%x)\nROOT %w = {state} while(%t), condition=%c, body=%outer, {_trips(10)}"
    assert seconds(module(entry, others=inner + body)) == pytest.approx(30 * DOT_SECONDS)


def _trips(count: int) -> str:
    return f'backend_config={{"known_trip_count":{{"n":"{count}"}}}}'


def test_a_loop_of_unknown_length_counts_once_and_is_noted():
    body = computation("body", f"ROOT %d = {SQUARE} {DOT.format('%p')}")
    time = step_time(module(f"ROOT %w = {SQUARE} while(%x), condition=%c, body=%body", others=body), CHIP)
    assert time.seconds == pytest.approx(DOT_SECONDS)
    assert "unknown trip count" in " ".join(time.notes)


def test_of_a_conditional_the_slowest_branch_counts():
    slow = computation("slow", f"ROOT %d = {SQUARE} {DOT.format('%p')}")
    fast = computation("fast", f"ROOT %n = {SQUARE} negate(%p)")
    branches = ("branch_computations={%fast, %slow}", "true_computation=%slow, false_computation=%fast")
    for attribute in branches:
        text = module(f"ROOT %c = {SQUARE} conditional(%x, %x, %x), {attribute}", others=slow + fast)
        assert seconds(text) == pytest.approx(DOT_SECONDS)


def test_a_computation_that_two_calls_share_counts_twice():
    called = computation("called", f"ROOT %d = {SQUARE} {DOT.format('%p')}")
    text = module(
        f"%a = {SQUARE} call(%x), to_apply=%called\nROOT %b = {SQUARE} call(%a), to_apply=%called", others=called
    )
    assert seconds(text) == pytest.approx(2 * DOT_SECONDS)


def test_a_library_product_is_a_product():
    half = "bf16[4000,4000]{1,0}"
    config = '"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}'
    call = f'custom-call(%y, %y), custom_call_target="__cublas$lt$matmul", backend_config={{{config}}}'
    text = module(f"%y = {half} bitcast(%x)\nROOT %g = ({half}, s8[33554432]{{0}}) {call}")
    assert seconds(text) == pytest.approx(2 * 4000**3 / 2e12)


@pytest.mark.parametrize("scratch", ["s8[33554432]{0}", "u8[33554432]{0}"])
@pytest.mark.parametrize("library", ["__cublas$gemm", "__cudnn$convForward"])
def test_the_workspace_of_a_library_call_is_not_traffic(library, scratch):
    call = f'custom-call(%x, %x), custom_call_target="{library}"'
    result, statistics = "f32[1000,1000]{1,0}", "f32[1000]{0}"
    text = module(f"ROOT %g = ({result}, {statistics}, {scratch}) {call}")
    assert seconds(text) == pytest.approx((3 * 4e6 + 4e3) / 1e11)
    first = module(f"ROOT %g = ({scratch}, {result}) {call}")  # a result of bytes is a result
    assert seconds(first) == pytest.approx((3 * 4e6 + 33554432) / 1e11)
    mine = text.replace(library, "mine")  # what somebody else's call returns is unknown
    assert seconds(mine) == pytest.approx((3 * 4e6 + 4e3 + 33554432) / 1e11)


@pytest.mark.parametrize(("mask", "share"), [("NO_MASK", 1), ("CAUSAL", 0.5)])
@pytest.mark.parametrize(("target", "products"), [("__cudnn$fmhaSoftmax", 2), ("__cudnn$fmhaSoftmaxBackward", 5)])
def test_cudnns_attention_multiplies_queries_by_keys(target, products, mask, share):
    query = "bf16[2,4096,4,64]{3,2,1,0}"
    config = '"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "4", "4096", "4096"]}, '
    config += f'"mask_type": "{mask}"'
    call = f'custom-call(%q, %q, %q), custom_call_target="{target}", backend_config={{{config}}}'
    expected = products * 2 * (2 * 4 * 4096 * 4096) * 64 * share / 2e12
    assert seconds(module(f"%q = {query} bitcast(%x)\nROOT %a = {query} {call}")) == pytest.approx(expected)


def test_a_custom_call_that_says_nothing_moves_its_bytes():
    assert seconds(module(f'ROOT %k = {SQUARE} custom-call(%x), custom_call_target="mine"')) == pytest.approx(
        8e6 / 1e11
    )


def test_a_pallas_kernel_is_what_its_author_states():
    stated = (
        '"custom_call_config":{"cost_estimate":{"flops":"5000000000","transcendentals":"7","bytes_accessed":"8000000"}}'
    )
    call = f'custom-call(%x), custom_call_target="tpu_custom_call", backend_config={{{stated}}}'
    assert seconds(module(f"ROOT %k = {SQUARE} {call}")) == pytest.approx(5e9 / 1.5e12)
    assert seconds(module(f"ROOT %k = {SQUARE} {call.replace('5000000000', '5')}")) == pytest.approx(8e6 / 1e11)


def test_the_notes_of_a_compiler_to_itself_take_no_time():
    assert seconds(module(f'ROOT %k = {SQUARE} custom-call(), custom_call_target="AllocateBuffer"')) == 0


def test_a_nominal_cpu_says_that_it_is_one():
    time = step_time(module(f"ROOT %d = {SQUARE} {DOT.format('%x')}"), NOMINAL_CPU)
    assert time.seconds == pytest.approx(0.02) and "nominal CPU" in time.notes[0]


@pytest.mark.parametrize("text", ["", "no HLO at all", "HloModule m\n\n%f (p: f32[]) -> f32[] {\n}\n"])
def test_a_text_without_an_entry_is_refused(text):
    with pytest.raises(ValueError, match="ENTRY"):
        step_time(text, CHIP)


def test_text_that_is_cut_off_or_calls_itself_ends():
    text = module(f"%f = {SQUARE} fusion(%x), kind=kLoop, calls=%f\nROOT %c = {SQUARE} call(%f), to_apply=%main")
    for end in range(0, len(text), 7):
        if "ENTRY" in text[:end] and text[:end].count("{") > 1:
            assert step_time(text[:end], CHIP).seconds >= 0
