"""The verdict on a run is that on its worst phase; a phase's program is compiled where only that can tell."""

import functools

import pytest

from jaxmem.analysis._facts import MemoryFacts
from jaxmem.analysis._fits import judge_fit
from jaxmem.analysis._phases import PhaseNeed, Phases, told_phases
from jaxmem.analysis._sizes import MemoryBytes

pytestmark = pytest.mark.once

MIB = 2**20
CAPACITY = 1000 * MIB


def facts(peak, argument=100 * MIB):
    fits, reason = judge_fit(peak, CAPACITY)
    memory = MemoryBytes(argument_bytes=argument)
    told = {"argument_provenance": "compiled", "peak_bytes": peak, "capacity_bytes": CAPACITY, "notes": ()}
    return MemoryFacts(devices=1, memory=memory, fits=fits, fits_reason=reason, **told)


def told(step, *, state=100 * MIB, compiled=None, argument=100 * MIB, **beside):
    """What `told_phases` says, and how often something was compiled."""
    calls = []
    compile_it = functools.partial(lambda size: (calls.append(size), size)[1], compiled)
    program = {"init": compile_it} if compiled else {}
    needs = tuple(
        PhaseNeed(name=name, beside_bytes=size, how="The state.", compiled_bytes=program.get(name))
        for name, size in beside.items()
    )
    phases = Phases(state_bytes=state, other_bytes=10 * MIB, needs=needs)
    peaks, fits, reason = told_phases(phases, facts(step, argument))
    return {peak.name: ((peak.peak_bytes or 0) // MIB, peak.provenance) for peak in peaks}, fits, reason, len(calls)


def test_where_the_step_is_the_worst_its_verdict_stands_and_nothing_is_compiled():
    peaks, fits, reason, compiled = told(500 * MIB, init=200 * MIB, save=0, compiled=150 * MIB)
    assert peaks == {"init": (300, "modelled"), "step": (500, "compiled"), "save": (100, "modelled")}
    assert (fits, reason, compiled) == (*judge_fit(500 * MIB, CAPACITY), 0)
    # It is no already.
    assert told(1200 * MIB, init=1050 * MIB, compiled=1)[1:] == (*judge_fit(1200 * MIB, CAPACITY), 0)


def test_a_bound_that_exceeds_the_device_is_compiled_before_it_is_a_verdict():
    peaks, fits, reason, compiled = told(500 * MIB, init=950 * MIB, save=0, compiled=140 * MIB)
    assert (peaks["init"], fits, compiled) == ((140, "compiled"), "yes", 1) and reason.startswith("the peak, 500.0 MiB")
    _, fits, reason, _ = told(500 * MIB, init=950 * MIB, compiled=1050 * MIB)
    assert (fits, reason) == ("no", "the peak of init (compiled), 1.03 GiB, exceeds the 1000.0 MiB of a device")
    assert told(990 * MIB, init=880 * MIB, compiled=1)[1::2] == ("uncertain", 0)  # uncertain, whatever init takes


def test_a_bound_tells_neither_the_reason_nor_the_most_that_is_needed_where_another_phase_does_not_fit():
    peaks, fits, reason, compiled = told(500 * MIB, init=1500 * MIB, restore=910 * MIB, compiled=140 * MIB)
    assert (peaks["init"], fits, compiled) == ((140, "compiled"), "no", 1)
    assert reason.startswith("the peak of restore (modelled), 1010.0 MiB, exceeds")
    peaks, _, reason, compiled = told(500 * MIB, init=905 * MIB, restore=910 * MIB, compiled=140 * MIB)
    assert (peaks["init"], compiled) == ((1005, "modelled"), 0) and reason.startswith("the peak of restore")


def test_a_phase_without_a_program_is_judged_by_its_bound():
    _, fits, reason, _ = told(500 * MIB, restore=860 * MIB)
    assert fits == "uncertain" and reason.startswith("the peak of restore (modelled), 960.0 MiB, leaves less")


def test_padding_that_only_the_compiler_knows_is_counted():
    peaks, *_ = told(500 * MIB, save=0, argument=200 * MIB)
    assert peaks["save"] == (190, "modelled")


def test_what_goes_on_beside_steps_is_added_to_their_peak():
    ahead = PhaseNeed(name="batches ahead", beside_bytes=300 * MIB, with_steps=True, how="Two batches.")
    phases = Phases(state_bytes=100 * MIB, other_bytes=0, needs=(ahead,))
    for step, peak in ((500, 800), (None, 400)):
        peaks, *_ = told_phases(phases, facts(step and step * MIB))
        assert peaks[0].peak_bytes == peak * MIB


def test_a_program_that_is_no_step_has_none():
    alone = facts(500 * MIB)
    assert told_phases(None, alone) == ((), alone.fits, alone.fits_reason)
