"""Dumps of three compilers by two versions of JAX, read: totals are the compiler's, and nothing is passed over."""

import json
from pathlib import Path

import pytest

from jaxmem.analysis.assignment import padded_bytes, read_text

pytestmark = pytest.mark.once

GOLDENS = Path(__file__).parent / "goldens"
EXPECTED = json.loads((GOLDENS / "expected.json").read_text())


def _texts(name: str) -> tuple[str, str]:
    return tuple((GOLDENS / f"{name}-{kind}.txt").read_text() for kind in ("buffer-assignment", "live-range"))


@pytest.fixture(params=sorted(EXPECTED))
def golden(request):
    buffers, ranges = _texts(request.param)
    return request.param, buffers, read_text(buffers, ranges)


def test_there_is_one_of_every_backend_and_version():
    assert {name.split("-")[0] for name in EXPECTED} == {"cpu", "gpu", "tpu"}
    assert {name.split("-")[1] for name in EXPECTED} == {"0.10.2", "0.12.0.1"}


def test_union_of_places_is_the_compilers_temporaries(golden):
    name, _, assignment = golden
    wanted = EXPECTED[name]["temp_size_in_bytes"]
    assert assignment.used_temp_bytes == pytest.approx(wanted, rel=0.01)
    assert assignment.temp_bytes == pytest.approx(wanted, rel=0.001)
    # At the peak nearly all of it is alive; the sum of the values' sizes is far more, as loops update in place.
    assert assignment.used_temp_bytes >= assignment.temp_sweep.peak_bytes >= 0.95 * wanted


def test_no_line_is_lost(golden):
    _, buffers, assignment = golden
    assert len(assignment.allocations) == buffers.count("\nallocation ")
    assert sum(len(a.values) for a in assignment.allocations) == buffers.count("\n value: ")
    for allocation in assignment.allocations:
        for value in allocation.values:
            assert value.allocation == allocation.number
            assert value.offset_bytes + value.size_bytes <= allocation.size_bytes
            if allocation.kind != "thread_local":
                assert 0 <= value.start <= value.end < len(assignment.schedule)


def test_sizes_follow_from_the_layouts(golden):
    _, _, assignment = golden
    for allocation in assignment.allocations:
        for value in allocation.values:
            if allocation.kind != "thread_local" and not value.layout.startswith("("):
                assert padded_bytes(value.layout) == value.size_bytes, value


def test_arguments_that_outputs_reuse(golden):
    name, _, assignment = golden
    donated = [a for a in assignment.allocations if a.kind == "parameter" and a.live_out]
    read_only = [a for a in assignment.allocations if a.kind == "parameter" and not a.live_out]
    leaves = 1 if name.startswith("tpu") else 2
    assert [a.parameter for a in sorted(donated, key=lambda a: a.parameter)] == list(range(2 * leaves))
    assert [a.parameter for a in read_only] == [2 * leaves]
    for allocation in donated:
        first, *_, last = sorted(allocation.values, key=lambda v: v.start)
        assert (first.start, last.end) == (0, len(assignment.schedule) - 1)
        assert first.end <= last.start


def test_memory_spaces_of_a_tpu():
    assignment = read_text(*_texts("tpu-0.10.2"))
    assert assignment.platform == "tpu"
    spaces = {assignment.memory_space(a.color) for a in assignment.allocations}
    assert {"device", "vmem", "smem"} <= spaces
    on_chip = [a for a in assignment.allocations if a.kind == "temp" and assignment.memory_space(a.color) == "vmem"]
    assert on_chip and not set(on_chip) & set(assignment.temps)


@pytest.mark.parametrize("cut", [0, 1, 777, 4000])
def test_cut_off_files_are_read_as_far_as_they_go(cut):
    buffers, ranges = _texts("gpu-0.12.0.1")
    whole = read_text(buffers, ranges)
    part = read_text(buffers[:cut], ranges[: cut // 2])
    assert len(part.allocations) <= len(whole.allocations)
    assert (
        part.schedule == whole.schedule[: len(part.schedule)]
        or part.schedule[:-1] == whole.schedule[: len(part.schedule) - 1]
    )
    assert part.temp_sweep.peak_bytes <= whole.temp_bytes
