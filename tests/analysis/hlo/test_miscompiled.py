"""Known faults of compilers: seen in a compiled program's text, avoided by an option, refused in a step."""

import itertools

import jax.numpy as jnp
import optax
import pytest

from jaxmem import MemoryConfig, Policy, Workload, make_train_step
from jaxmem._miscompilations import MISCOMPILATIONS, Miscompilation, faults_met, without_faults
from jaxmem.analysis import check_compiled
from jaxmem.analysis.hlo._miscompiled import miscompiled
from jaxmem.analysis.hlo._parse import parse_hlo
from jaxmem.errors import MiscompiledError

OLD = '"byte_offset":"{}","byte_stride":"{}"'
NEW = '"byte_offset":"0","byte_stride":"0","linear":{{"byte_offset":"{}","byte_stride":"{}"}}'

# The backward loop of a scan over four layers, as XLA:GPU writes it: trip i reads what layer 3 - i kept.
BACKWARD = """HloModule jit_step, is_scheduled=true

%read (buffer: f32[4,8,2], layer: s32[], zero: s32[]) -> f32[1,8,2] {
  %buffer = f32[4,8,2]{LAYOUT:S(SPACE)} parameter(0)
  %layer = s32[] parameter(1)
  %zero = s32[] parameter(2)
  ROOT %slice.1 = f32[1,8,2]{LAYOUT} dynamic-slice(%buffer, %layer, %zero, %zero), dynamic_slice_sizes={1,8,2}, COPY
}

%mirrored (i: s32[]) -> s32[] {
  %last = s32[] constant(3)
  %i = s32[] parameter(0)
  ROOT %left = s32[] subtract(%last, %i)
}

%body (state: (s32[], f32[4,8,2])) -> (s32[], f32[4,8,2]) {
  %state = (s32[], f32[4,8,2]{LAYOUT:S(SPACE)}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state), index=0
  %kept = f32[4,8,2]{LAYOUT:S(SPACE)} get-tuple-element(%state), index=1
  %one = s32[] constant(1)
  %nought = s32[] constant(0)
  %layer.1 = s32[] fusion(%i.1), kind=kLoop, calls=%mirrored
  %start = ((f32[4,8,2]{LAYOUT:S(SPACE)}), f32[1,8,2]{LAYOUT}) fusion-start(%kept, %layer.1, %nought), calls=%read
  %done = f32[1,8,2]{LAYOUT} fusion-done(%start)
  %next = s32[] add(%i.1, %one)
  ROOT %out = (s32[], f32[4,8,2]{LAYOUT:S(SPACE)}) tuple(%next, %kept)
}

ENTRY %main (given: f32[4,8,2]) -> f32[4,8,2] {
  %given = f32[4,8,2]{LAYOUT:S(SPACE)} parameter(0)
  %first = s32[] constant(0)
  %begin = (s32[], f32[4,8,2]{LAYOUT:S(SPACE)}) tuple(%first, %given)
  %loop = (s32[], f32[4,8,2]{LAYOUT:S(SPACE)}) while(%begin), condition=%condition, body=%body, COUNTED
  ROOT %end = f32[4,8,2]{LAYOUT:S(SPACE)} get-tuple-element(%loop), index=1
}
"""
COUNTED = (
    'backend_config={"known_trip_count":{"n":"4"},"known_init_step":{"init":"0","step":"1"},'
    '"known_induction_variable":{"tuple_index":"0"}}'
)
COPY = 'backend_config={"dynamic_slice_config":{"loop_index":"0",%s}}'


def text(place: str, space: int = 5, layout: str = "2,1,0") -> str:
    """The program, with the place that its copy from memory `space` is annotated with."""
    made = BACKWARD.replace("COPY", COPY % place).replace("COUNTED", COUNTED)
    return made.replace("LAYOUT", layout).replace("SPACE", str(space)).replace(":S(0)", "")


def backward(place: str, space: int = 5, layout: str = "2,1,0"):
    return parse_hlo(text(place, space, layout))


@pytest.mark.parametrize("form", [OLD, NEW], ids=["old", "new"])
def test_a_host_copy_of_another_layer_than_its_index_names_is_found(form):
    ((fault, (place,)),) = miscompiled(backward(form.format(0, 64)), "gpu")
    assert fault.name == "openxla/xla#46231"
    assert "slice.1" in place and "trip 0 of 4 is to start at byte 192, and is annotated to start at 0" in place
    assert miscompiled(backward(form.format(192, -64)), "gpu") == []


def test_a_copy_that_is_right_in_its_first_trip_alone_is_found():
    ((_, (place,)),) = miscompiled(backward(OLD.format(192, 64)), "gpu")
    assert "trip 1 of 4 is to start at byte 128" in place


def test_layers_that_lie_fastest_in_memory_are_counted_so():
    assert miscompiled(backward(OLD.format(12, -4), layout="0,2,1"), "gpu") == []
    assert miscompiled(backward(OLD.format(192, -64), layout="0,2,1"), "gpu")


@pytest.mark.parametrize("change", ["data", "memory", "platform", "unknown form"])
def test_what_proves_nothing_is_not_named(change):
    place, space, platform = OLD.format(0, 64), 5, "gpu"
    if change == "memory":
        space = 0  # no copy is made by this annotation
    if change == "platform":
        platform = "tpu"
    if change == "unknown form":
        place = '"byte_offset":"0","byte_stride":"0","table":{"offsets":["192"]}'
    module = backward(place, space)
    if change == "data":  # the layer comes out of the loop's state, which nobody follows
        body = module.computations["body"].instructions
        body["i.1"].rest = "%state), index=1"
    assert miscompiled(module, platform) == []


# A loop that adds rows of an embedding's gradient to their sum, partitioned over devices: only the first of them starts
# a trip from the sum. The reduction is to come before the trip ends, and stood after the loop.
SCATTERED = """HloModule jit_f, is_scheduled=true

%start (sum.1: f32[96,8], elsewhere: pred[]) -> f32[96,8] {
  %elsewhere = pred[] parameter(1)
  %which = pred[96,8]{1,0} broadcast(%elsewhere), dimensions={}
  %nothing = f32[] constant(0)
  %zeros = f32[96,8]{1,0} broadcast(%nothing), dimensions={}
  %sum.1 = f32[96,8]{1,0} parameter(0)
  ROOT %select.1 = f32[96,8]{1,0} select(%which, %zeros, %sum.1)
}

%add (start.1: f32[96,8], rows: s32[4], updates: f32[4,8]) -> f32[96,8] {
  %start.1 = f32[96,8]{1,0} parameter(0)
  %rows = s32[4]{0} parameter(1)
  %updates = f32[4,8]{1,0} parameter(2)
  ROOT %scatter.1 = f32[96,8]{1,0} scatter(%start.1, %rows, %updates), update_window_dims={1}, to_apply=%plus
}

%body (state: (s32[], f32[96,8], s32[4], f32[4,8])) -> (s32[], f32[96,8], s32[4], f32[4,8]) {
  %state = (s32[], f32[96,8]{1,0}, s32[4]{0}, f32[4,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %sum = f32[96,8]{1,0} get-tuple-element(%state), index=1
  %r = s32[4]{0} get-tuple-element(%state), index=2
  %u = f32[4,8]{1,0} get-tuple-element(%state), index=3
  %device = DEVICE
  %other = pred[] convert(%device)
  %begin = f32[96,8]{1,0} fusion(%sum, %other), kind=kLoop, calls=%start
  %added = f32[96,8]{1,0} fusion(%begin, %r, %u), kind=kCustom, calls=%add
  %next = f32[96,8]{1,0} REDUCED(%added), to_apply=%plus
  ROOT %out = (s32[], f32[96,8]{1,0}, s32[4]{0}, f32[4,8]{1,0}) tuple(%i, %next, %r, %u)
}

ENTRY %main (given: (s32[], f32[96,8], s32[4], f32[4,8])) -> f32[96,8] {
  %given = (s32[], f32[96,8]{1,0}, s32[4]{0}, f32[4,8]{1,0}) parameter(0)
  %loop = (s32[], f32[96,8]{1,0}, s32[4]{0}, f32[4,8]{1,0}) while(%given), condition=%condition, body=%body
  %sums = f32[96,8]{1,0} get-tuple-element(%loop), index=1
  ROOT %all = f32[96,8]{1,0} all-reduce(%sums), to_apply=%plus
}
"""


@pytest.mark.parametrize(
    ("reduced", "device", "found"),
    [
        ("copy", "u32[] partition-id()", True),
        ("all-reduce", "u32[] partition-id()", False),
        ("copy", "s32[] get-tuple-element(%state), index=0", False),  # the same on all devices
    ],
    ids=["after the loop", "in it", "not by device"],
)
def test_a_scattered_sum_that_no_trip_reduces_is_found(reduced, device, found):
    module = parse_hlo(SCATTERED.replace("REDUCED", reduced).replace("DEVICE", device))
    names = [(fault.name, places) for fault, places in miscompiled(module, "tpu")]
    place = "element 1 of loop: a scatter adds to it on each device, and no trip reduces it"
    assert names == ([("openxla/xla#49143", (place,))] if found else [])


def test_a_cure_joins_what_the_user_disables_in_options_and_in_the_environment(monkeypatch):
    faults, option = MISCOMPILATIONS[:1], "xla_disable_hlo_passes"
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    assert without_faults(None, ()) is None and without_faults({"a": 1}, ()) == {"a": 1}
    monkeypatch.setenv("XLA_FLAGS", f"--xla_dump_to=/nowhere --{option}=fusion,algsimp")
    assert without_faults({"a": 1}, faults) == {"a": 1, option: "fusion,algsimp,dynamic-slice-annotator"}
    assert without_faults({option: "dynamic-slice-annotator,cse"}, faults) == {option: "dynamic-slice-annotator,cse"}


@pytest.mark.parametrize(
    ("installed", "met"), [("0.10.1", False), ("0.10.2", True), ("0.11.2", True), ("0.12.0.1", False)]
)
def test_a_fault_is_met_in_its_versions_by_what_offloads(monkeypatch, installed, met):
    monkeypatch.setattr("jaxmem._miscompilations.version", lambda name: installed)
    assert bool(faults_met("gpu", offloads=True)) == met
    assert not faults_met("gpu", offloads=False) and not faults_met("tpu", offloads=True)


def test_a_step_that_offloads_gets_the_cure_and_another_keeps_its_options(monkeypatch):
    monkeypatch.setattr(Miscompilation, "here", True)

    def loss(w, x, *, memory):
        return jnp.mean(memory.block(lambda w, x: jnp.sin(x @ w))(w, x))

    workload = Workload(
        loss, jnp.eye(4), jnp.ones((8, 4)), optax.sgd(0.1), compiler_options={"xla_disable_hlo_passes": "cse"}
    )
    offloading = make_train_step(workload, MemoryConfig(remat=Policy(offload=("h",))))
    plain = make_train_step(workload, MemoryConfig())
    assert offloading.spec.compiler_options("gpu") == {"xla_disable_hlo_passes": "cse,dynamic-slice-annotator"}
    for step, platform in itertools.product((offloading, plain), ("cpu", "tpu")):
        assert step.spec.compiler_options(platform) == {"xla_disable_hlo_passes": "cse"}
    assert plain.spec.compiler_options("gpu") == {"xla_disable_hlo_passes": "cse"}


def test_a_compiled_step_that_shows_a_fault_is_refused_by_name(monkeypatch):
    class Compiled:
        def as_text(self):
            return text(OLD.format(0, 64))

    monkeypatch.setattr(Miscompilation, "here", True)
    with pytest.raises(MiscompiledError, match=r"'step' right; got XLA:GPU .*xla#46231.*dynamic-slice-annotator"):
        check_compiled(Compiled(), "gpu", "step")
    check_compiled(Compiled(), "tpu", "step")
