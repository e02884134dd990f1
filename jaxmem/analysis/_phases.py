"""What a run needs beside its steps: making the state, restoring and saving it; and whether all of it fits."""

import dataclasses
from collections.abc import Callable

from jaxmem._display import column, record
from jaxmem._shown import Brief
from jaxmem.analysis._facts import MemoryFacts
from jaxmem.analysis._fits import Fits, judge_fit

_VERDICTS: tuple[Fits, ...] = ("yes", "uncertain", "no")  # the worst is last


@record
class PhasePeak(Brief):
    """The most that one phase of a run needs, per device."""

    # fmt: off
    name: str = column('"init", "step", "restore", "save".')
    peak_bytes: int | None = column("Of device memory, the state included; None where it is unknown.", "provenance")
    host_bytes: int = column(
        "Of the host's memory besides, for each device's part of the state; without the buffers that Orbax packs and "
        "unpacks it in.", "provenance", default=0)
    provenance: str = column(
        '"compiled", or "modelled": an upper bound, unless a creator computes with more than it returns.')
    how: str = column("How the bytes were told, in a sentence.")
    # fmt: on


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseNeed(Brief):
    """What a phase needs beside the state, or beside a step, as modelled before anything is compiled.

    Args:
      name: of the phase.
      beside_bytes: on one device, at most.
      with_steps: whether steps go on meanwhile, so that it needs them beside a step's peak.
      host_bytes: on the host, for one device's part of the state.
      how: a sentence on what is counted.
      compiled_bytes: compiles the phase's program for its peak; None where there is none, or the peak is not told.
        Called only where the model would make the verdict, or the most that a run needs, worse than other phases do.
    """

    name: str
    beside_bytes: int
    with_steps: bool = False
    host_bytes: int = 0
    how: str
    compiled_bytes: Callable[[], int | None] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Phases(Brief):
    """The phases of a run, of which the analysed program is the step.

    Args:
      state_bytes: of one device's part of the state, by shapes.
      other_bytes: of the step's other arguments: a compiler that pads arrays tells more of both.
      needs: of the other phases, in the order in which they are listed.
    """

    state_bytes: int
    other_bytes: int
    needs: tuple[PhaseNeed, ...]


def told_phases(phases: Phases | None, facts: MemoryFacts) -> tuple[tuple[PhasePeak, ...], Fits, str]:
    """The peak of each phase, and the verdict on the worst of them with its reason; that of the program where none is.

    Args:
      phases: None of a program that is no step.
      facts: what the compiler says of the step.
    """
    if phases is None:
        return (), facts.fits, facts.fits_reason
    state = max(phases.state_bytes, (facts.memory.argument_bytes or 0) - phases.other_bytes)
    step = PhasePeak(name="step", peak_bytes=facts.peak_bytes, provenance="compiled", how="Its own program.")
    peaks = {"step": step}
    for need in phases.needs:
        peaks[need.name] = PhasePeak(
            name=need.name,
            peak_bytes=(facts.peak_bytes or state if need.with_steps else state) + need.beside_bytes,
            host_bytes=need.host_bytes,
            provenance="modelled",
            how=need.how,
        )
    verdicts = {name: _verdict(peak, facts) for name, peak in peaks.items()}
    verdicts["step"] = facts.fits, facts.fits_reason

    def badness(name: str) -> tuple[int, int]:
        return _VERDICTS.index(verdicts[name][0]), peaks[name].peak_bytes or 0

    for need in phases.needs:
        fits, size = badness(need.name)
        others, sizes = zip(*(badness(name) for name in peaks if name != need.name), strict=True)
        if need.compiled_bytes is None or not fits or (fits <= max(others) and size <= max(sizes)):
            continue
        compiled = need.compiled_bytes()
        if compiled is not None:
            how = "Its own program, compiled since a bound of its bytes would not tell whether it fits."
            peaks[need.name] = dataclasses.replace(
                peaks[need.name], peak_bytes=compiled, provenance="compiled", how=how
            )
            verdicts[need.name] = _verdict(peaks[need.name], facts)
    worst = max(badness(name)[0] for name in peaks)
    equals = [name for name in peaks if badness(name)[0] == worst]
    named = "step" if "step" in equals else max(equals, key=badness)
    listed = [peaks[need.name] for need in phases.needs]
    return (*listed[:1], step, *listed[1:]), *verdicts[named]


def _verdict(peak: PhasePeak, facts: MemoryFacts) -> tuple[Fits, str]:
    return judge_fit(peak.peak_bytes, facts.capacity_bytes, of=f" of {peak.name} ({peak.provenance})")
