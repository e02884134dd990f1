import time

import jax
import jax.numpy as jnp
import pytest

from jaxmem.analysis import analyze, hlo_flops, jaxpr_flops
from tests.analysis.programs import (
    BACKWARD,
    FORWARD,
    INPUTS,
    ONE,
    ROWS,
    WEIGHTS,
    WIDTH,
    compiled_text,
    nested,
    scanned,
    unrolled,
)


def gradient_flops(loss):
    return hlo_flops(compiled_text(jax.grad(loss), WEIGHTS, INPUTS))


@pytest.mark.parametrize("prevent_cse", [True, False])
def test_scanned_recomputation_is_the_difference_to_the_plain_step(prevent_cse):
    plain = gradient_flops(scanned(remat=False))
    full = gradient_flops(scanned(remat=True, prevent_cse=prevent_cse))
    assert (plain.flops, plain.forward_flops, plain.recompute_flops) == (FORWARD + BACKWARD, FORWARD, 0)
    assert full.recompute_flops == FORWARD
    assert full.flops - plain.flops == full.recompute_flops


@pytest.mark.parametrize(("remat", "remat_segments", "times"), [(True, False, 1), (False, True, 1), (True, True, 2)])
def test_nested_scans_multiply_and_nested_checkpoints_add(remat, remat_segments, times):
    plain = gradient_flops(nested(remat=False, remat_segments=False))
    full = gradient_flops(nested(remat=remat, remat_segments=remat_segments))
    assert plain.flops == FORWARD + BACKWARD
    assert full.recompute_flops == times * FORWARD
    assert full.flops - plain.flops == full.recompute_flops


def test_an_unrolled_model_counts_every_layer():
    plain = gradient_flops(unrolled(remat=False))
    assert plain.flops == FORWARD + BACKWARD - ONE  # nobody asks for the gradient of the input
    assert plain.forward_flops == FORWARD


def test_a_loop_without_known_trip_count_counts_once_and_says_so():
    def fn(x, w):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 9, lambda x: x @ w, x)

    square = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    counted = hlo_flops(compiled_text(fn, square, square))
    assert counted.flops == 2 * 32**3
    assert [note for note in counted.notes if "1 loop(s) with an unknown trip count" in note]


def test_a_conditional_counts_its_costliest_branch_and_says_so():
    def fn(flag, x):
        return jax.lax.cond(flag, lambda x: x @ x @ x, lambda x: x @ x, x)

    flag, square = jax.ShapeDtypeStruct((), bool), jax.ShapeDtypeStruct((32, 32), jnp.float32)
    counted = hlo_flops(compiled_text(fn, flag, square))
    assert counted.flops == 2 * 2 * 32**3
    assert [note for note in counted.notes if "1 conditional(s)" in note]


def module(*entry: str, before: str = "") -> str:
    lines = "\n".join(f"  {line}" for line in entry)
    tables = "HloModule m\n\nFileLocations\n1 {file_name_id=1 line=8}\n"
    return f"{tables}\n{before}\nENTRY %main (p: f32[8]) -> f32[8] {{\n{lines}\n}}\n"


PARAMETERS = ("%a = f32[8,16]{1,0} parameter(0)", "%b = f32[16,4]{1,0} parameter(1)")
DOT = "dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}"


# As the TPU compiler writes it: no trip count, and the comparison inside a fusion.
LOOP = """
%compare (x: s32[], y: s32[]) -> pred[] {
  %x = s32[]{:T(128)} parameter(0)
  %y = s32[]{:T(128)} parameter(1)
  ROOT %lt = pred[]{:T(512)} compare(%x, %y), direction=LT
}

%condition (state: (s32[], f32[8,16], f32[16,4])) -> pred[] {
  %bound = s32[]{:T(128)} constant(7)
  %state = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, f32[16,4]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %fusion = pred[]{:T(512)} fusion(%i, %bound), kind=kLoop, calls=%compare
}

%body (state: (s32[], f32[8,16], f32[16,4])) -> (s32[], f32[8,16], f32[16,4]) {
  %state = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, f32[16,4]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%state), index=0
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%i, %one)
  %a = f32[8,16]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %b = f32[16,4]{1,0:T(8,128)} get-tuple-element(%state), index=2
  %y = f32[8,4]{1,0:T(8,128)S(1)} convolution(%a, %b), dim_labels=bf_io->bf, metadata={op_name="jit(f)/while/body/dot"}
  ROOT %tuple = (s32[]{:T(128)}, f32[8,16]{1,0:T(8,128)}, f32[16,4]{1,0:T(8,128)}) tuple(%next, %a, %b)
}
"""
STATE = "(s32[]{:T(128)}, f32[8,16]{1,0}, /*index=2*/f32[16,4]{1,0})"


def loop_trips(old: str = "", new: str = "") -> int | None:
    """Trips counted after one edit of the loop's text; None where the counter says that it cannot know."""
    entry = ("%zero = s32[]{:T(128)} constant(0)", "%start = s32[]{:T(128)} copy(%zero)", *PARAMETERS)
    tuple_ = f"%init = {STATE} tuple(%start, %a, %b)"
    while_ = f"ROOT %w = {STATE} while(%init), condition=%condition, body=%body"
    text = module(*entry, tuple_, while_, before=LOOP)
    assert old in text
    counted = hlo_flops(text.replace(old, new) if old else text)
    trips, rest = divmod(counted.flops, 2 * 8 * 16 * 4)
    assert rest == 0
    if counted.notes:
        assert "unknown trip count" in counted.notes[0]
        assert trips == 1
        return None
    return trips


@pytest.mark.parametrize(
    ("old", "new", "trips"),
    [
        ("", "", 7),
        ("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[]{:T(128)} constant(2)", 5),
        ("%one = s32[]{:T(128)} constant(1)", "%one = s32[]{:T(128)} constant(2)", 4),
        ("direction=LT", "direction=LE", 8),
        ("compare(%x, %y), direction=LT", "compare(%y, %x), direction=GT", 7),
        # And what cannot be known.
        ("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[]{:T(128)} parameter(2)", None),
        ("%bound = s32[]{:T(128)} constant(7)", "%bound = s32[]{:T(128)} get-tuple-element(%state), index=0", None),
        ("add(%i, %one)", "multiply(%i, %one)", None),
        ("direction=LT", "direction=NE", None),
    ],
)
def test_the_trip_count_is_worked_out_where_the_compiler_gives_none(old, new, trips):
    assert loop_trips(old, new) == trips


def test_gemm_and_convolution_custom_calls_are_counted():
    gemm = (
        '%g = (f32[8,4]{1,0}, s8[1024]{0}) custom-call(%a, %b), custom_call_target="__cublas$gemm", backend_config='
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}'
    )
    shapes = {"x": "f32[8,33,33,64]{3,2,1,0}", "k": "f32[128,3,3,64]{3,2,1,0}", "y": "f32[8,16,16,128]{3,2,1,0}"}
    images = [f"%{name} = {shape} parameter({i})" for i, (name, shape) in enumerate(shapes.items(), 2)]
    convolutions = [
        f"%conv-{out} = ({shapes[out]}, u8[0]{{0}}) custom-call(%{lhs}, %{rhs}), window={{size=3x3 stride=2x2}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="__cudnn$conv{kind}"'
        for kind, lhs, rhs, out in (
            ("Forward", "x", "k", "y"),
            ("BackwardInput", "y", "k", "x"),
            ("BackwardFilter", "x", "y", "k"),
        )
    ]
    counted = hlo_flops(module(*PARAMETERS, gemm, *images, *convolutions))
    assert counted.flops == 2 * 8 * 16 * 4 + 3 * (2 * 8 * 16 * 16 * 128 * 9 * 64)
    assert counted.notes == ()


def test_a_custom_call_that_may_multiply_is_named_and_a_harmless_one_is_not():
    calls = [
        '%c = f32[8,4]{1,0} custom-call(%a, %b), custom_call_target="__onednn$matmul"',
        '%d = f32[8,16]{1,0} custom-call(%a), custom_call_target="Sharding"',
    ]
    counted = hlo_flops(module(*PARAMETERS, *calls))
    assert counted.flops == 0
    assert counted.notes == ("FLOPs inside custom calls are not counted: __onednn$matmul (1x).",)


@pytest.mark.parametrize(
    ("scope", "forward", "recompute"),
    [
        ("jit(f)/jvp()/dot", 1024, 0),
        ("jit(f)/transpose(jvp())/dot", 0, 0),
        ("jit(f)/transpose(jvp())/checkpoint/rematted_computation/dot", 0, 1024),
    ],
)
def test_what_a_fusion_swallowed_without_label_takes_the_label_of_the_fusion(scope, forward, recompute):
    lines = "\n  ".join([*PARAMETERS, f"ROOT %y = f32[8,4]{{1,0}} {DOT}"])
    fused = f"%fused (a: f32[8,16], b: f32[16,4]) -> f32[8,4] {{\n  {lines}\n}}\n"
    call = f'ROOT %f = f32[8,4]{{1,0}} fusion(%a, %b), kind=kCustom, calls=%fused, metadata={{op_name="{scope}"}}'
    counted = hlo_flops(module(*PARAMETERS, call, before=fused))
    assert (counted.flops, counted.forward_flops, counted.recompute_flops) == (1024, forward, recompute)


def test_operands_printed_with_their_types_or_without_percent_signs_are_read():
    typed = f"ROOT %y = f32[8,4]{{1,0}} {DOT}".replace("%a, %b", "f32[8,16]{1,0:T(8,128)} %a, f32[16,4]{1,0} %b")
    assert hlo_flops(module(*PARAMETERS, typed)).flops == 1024
    assert hlo_flops(module(*PARAMETERS, f"ROOT %y = f32[8,4]{{1,0}} {DOT}").replace("%", "")).flops == 1024


def test_text_without_entry_is_refused():
    with pytest.raises(ValueError, match="ENTRY"):
        hlo_flops("HloModule m\n")


def test_counting_is_linear():
    lines = [f'%y.{i} = f32[8,4]{{1,0}} {DOT}, metadata={{op_name="jit(f)/jvp()/dot_general"}}' for i in range(100_000)]
    text = module(*PARAMETERS, *lines)
    start = time.process_time()
    assert hlo_flops(text).flops == 100_000 * 1024
    assert time.process_time() - start < 10  # about 2 s; a quadratic walk takes minutes


@pytest.mark.parametrize("spec", ["bi,bi->b", "bi,bj->bij", "i,i->"])
def test_dots_of_vectors_count_although_the_compiler_writes_them_as_products_and_sums(spec):
    """Else the forward pass seems to lack them, and recomputation to have been removed by the compiler."""
    x = jax.ShapeDtypeStruct((ROWS, WIDTH) if "b" in spec else (WIDTH,), jnp.float32)
    fn = lambda x, y: jnp.einsum(spec, x, y)  # noqa: E731
    assert hlo_flops(compiled_text(fn, x, x)).flops == jaxpr_flops(jax.make_jaxpr(fn)(x, x)).forward > 0


def test_dots_of_vectors_do_not_hide_recomputation():
    body = scanned(remat=True)

    def loss(weights, x):
        return body(weights, x) + jnp.sum(jnp.einsum("bi,bj->bij", x, x) * weights[0]) ** 2

    report = analyze(jax.grad(loss), WEIGHTS, INPUTS, target="cpu")
    assert report.recompute_flops == report.asked_recompute_flops == FORWARD
    assert not any("removed" in warning for warning in report.warnings)
