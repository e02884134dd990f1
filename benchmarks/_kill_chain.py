"""One run that is killed, once or more, and resumed until its end: what became of its checkpoints?"""

import dataclasses
import functools
import random
import shutil
from pathlib import Path

from benchmarks import _kill_run as run
from benchmarks._forked import Forked

_MOST_KILLS = 4


@dataclasses.dataclass(frozen=True)
class Known:
    """What an unhindered run of a kind told.

    Args:
      digests: of the state at each window, without checkpoints.
      training: (seconds, file operations) from its first window to its end, a checkpoint a window.
      restoring: those from its beginning to its first window, where a state is restored.
    """

    digests: list[str]
    training: tuple[float, int]
    restoring: tuple[float, int]


@dataclasses.dataclass
class Outcome:
    """What was found, as sentences; only `kills` is good to have."""

    kills: list[str] = dataclasses.field(default_factory=list)
    lost: list[str] = dataclasses.field(default_factory=list)
    wrong: list[str] = dataclasses.field(default_factory=list)
    partial: list[str] = dataclasses.field(default_factory=list)
    alarms: list[str] = dataclasses.field(default_factory=list)
    leftovers: list[str] = dataclasses.field(default_factory=list)


def start(function, kind: str, *args, **settings) -> Forked:
    """A process with one of the functions of `_kill_run`."""
    return Forked(function, kind, *args, prepare=functools.partial(run.prepare, kind), **settings)


def unhindered(function, kind: str, *args, **settings) -> Forked:
    """One that must end well."""
    process = start(function, kind, *args, **settings)
    if (ended := process.end()) != "ended":
        raise RuntimeError(f"an unhindered run of {kind} {ended}: {process.output()}")
    return process


def learn(kind: str, folder: Path) -> Known:
    """Runs a kind unhindered: without checkpoints, with them, and from the last but one on."""
    plain = unhindered(run.trajectory, kind)
    saved = unhindered(run.train, kind, str(folder), 1, watched=folder)
    shutil.rmtree(folder / str(run.WINDOWS))
    again = unhindered(run.train, kind, str(folder), 1, watched=folder)
    digests = plain.value("digests")
    for process in (saved, again):
        if process.value("ends") != digests[-1]:
            raise RuntimeError(f"{kind} ends otherwise with checkpoints than without, though nothing was killed")
    spent = [
        (last.seconds - first.seconds, last.operations - first.operations)
        for process, names in ((saved, ("window", "ends")), (again, ("begins", "window")))
        for first, last in [[process.all(name)[0] for name in names]]
    ]
    return Known(digests, *spent)


def complete(folder: Path) -> set[int]:
    """The numbers with a manifest."""
    return {int(path.parent.name) for path in folder.glob("*/checkpoint.json") if path.parent.name.isdigit()}


def schedule(save_every: int) -> list[int]:
    """The windows after which a run saves."""
    return sorted({*range(save_every, run.WINDOWS + 1, save_every), run.WINDOWS})


def chain(kind: str, known: Known, folder: Path, seed: int) -> Outcome:
    """A run to its end, killed once to `_MOST_KILLS` times at moments that `seed` draws."""
    draw = random.Random(seed)
    outcome, save_every = Outcome(), draw.choice((1, 2, 3))
    args = (kind, str(folder), save_every)
    name = f"{kind} (seed {seed})"
    for _ in range(draw.choice((1, 2, 2, _MOST_KILLS))):
        before = complete(folder)
        process, how = _killed(draw, known, folder, args, restoring=bool(before) and draw.random() < 0.6)
        if not how:
            break  # the run had ended before its moment came
        outcome.kills.append(how)
        name = f"{name}, killed {how}"
        _check_beginning(process, before, outcome, name)
        _check_folder(folder, process, save_every, outcome, name)
    if outcome.kills:
        _look(kind, known, folder, outcome, name)
        _resume(known, folder, args, outcome, name)
    return outcome


def _killed(draw: random.Random, known: Known, folder: Path, args, *, restoring: bool) -> tuple[Forked, str]:
    """A process that was killed, and where: in a restore or anywhere; by the clock, or at a file operation."""
    seconds, operations = known.restoring if restoring else known.training
    where = "restoring" if restoring else "training"
    if draw.random() < 0.5:
        process, after = start(run.train, *args), draw.uniform(0, seconds)
        process.until("begins" if restoring else "window", 120)
        how, ended = f"{after:.3f} s into {where}", process.end(kill_after=after)
    else:
        number, delay = draw.randint(1, operations), draw.choice((0.0, 0.0, draw.uniform(0, 0.02)))
        process = start(run.train, *args, watched=folder, die_at=(number, delay))
        how, ended = f"{delay * 1e3:.1f} ms after file operation {number} of {where}", process.end()
    if ended not in ("killed", "ended"):
        raise RuntimeError(f"{args} {ended} before it was killed: {process.output()}")
    return process, how if ended == "killed" else ""


def _check_beginning(process: Forked, before: set[int], outcome: Outcome, name: str) -> None:
    """That a process went on at the newest complete checkpoint, and saw no damage where there was none."""
    outcome.alarms += [f"{name}: {event.value}" for event in process.all("warning") if "amage" in event.value]
    windows, newest = process.all("window"), max(before, default=0)
    if windows and windows[0].value != newest:
        found = outcome.lost if windows[0].value < newest else outcome.partial
        found.append(f"{name}: it had begun at {windows[0].value}, where {sorted(before)} were complete")


def _check_folder(folder: Path, process: Forked, save_every: int, outcome: Outcome, name: str) -> None:
    """That all is complete that must be: every save before the pending one, and of these the newest `KEEP`."""
    have, window = complete(folder), process.value("window", 0)
    begun = [number for number in schedule(save_every) if number < window]  # the save of `window` may not have
    newest = max(have, default=0)
    if newest < max(begun[:-1], default=0):
        outcome.lost.append(f"{name}: in window {window} the newest complete is {newest}, saved every {save_every}")
    kept = [number for number in schedule(save_every) if number <= newest][-run.KEEP :]
    if not have.issuperset(kept):
        outcome.lost.append(f"{name}: complete are {sorted(have)}, where {kept} were to be kept")


def _look(kind: str, known: Known, folder: Path, outcome: Outcome, name: str) -> None:
    """That every complete checkpoint can be restored, and is the state of its window."""
    process, before = start(run.look, kind, str(folder)), complete(folder)
    if (ended := process.end()) != "ended":
        outcome.lost.append(f"{name}: to look at it {ended}: {process.output()}")
    found = {int(number): value for number, value in process.value("found", {}).items()}
    outcome.partial += [f"{name}: {number} is listed without a manifest" for number in set(found) - before]
    for number in before:
        value = found.get(number, "not listed")
        if value != known.digests[number]:
            told = outcome.partial if len(value) == len(known.digests[0]) else outcome.lost
            told.append(f"{name}: {number} restored is {value}")


def _resume(known: Known, folder: Path, args, outcome: Outcome, name: str) -> None:
    """That the run ends as it would have without kills, and leaves what it was to keep and nothing else."""
    before = complete(folder)
    process = start(run.train, *args)
    ended, name = process.end(), f"{name}, resumed"
    _check_beginning(process, before, outcome, name)
    if process.value("ends") != known.digests[-1]:
        outcome.wrong.append(f"{name}: {ended}, {process.value('error', 'in another state')}")
    wanted = {str(number) for number in schedule(args[2])[-run.KEEP :]}
    rest = {path.name for path in folder.iterdir()} - {".jaxmem.lock"}
    if not process.all("window"):  # killed after its last save, before that deleted an older one: nothing more is saved
        wanted |= rest & {str(number) for number in before}
    if rest != wanted:
        outcome.leftovers.append(f"{name}: in the end there are {sorted(rest)}, to be kept were {sorted(wanted)}")
