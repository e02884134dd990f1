"""Disks that are full, read-only, gone or shared with another run: is it said, and is what was saved still there?"""

import contextlib
import errno
import os
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

from benchmarks import _kill_run as run
from benchmarks._damage import content
from benchmarks._file_hook import FileHook
from benchmarks._forked import Forked
from benchmarks._kill_chain import complete, start, unhindered
from jaxmem.checkpoint import Manager, latest, restore, save
from jaxmem.errors import CheckpointError, CheckpointWarning

NOBODY = 65534


class Saver:
    """Saves three states in turn under rising numbers, and holds what is on disk against them."""

    def __init__(self, kind: str, folder: Path):
        self.folder, self.step, self.number = folder, run.step_of(kind), 0
        self.states = [self.step.init(jax.random.key(seed)) for seed in range(3)]
        self.digests = [run.digest(state) for state in self.states]
        self.save()

    def save(self) -> str:
        """The next state; what an error says, empty where there is none."""
        self.number += 1
        try:
            with Manager(self.folder, keep=2) as manager:
                manager.save(self.states[self.number % 3], number=self.number)
        except CheckpointError as error:
            return str(error)
        except Exception as error:
            return f"BAD: {type(error).__name__}: {error}"
        return ""

    def complaints(self, said: str) -> list[str]:
        """What is wrong after a save that said this."""
        have, found = complete(self.folder), []
        if said.startswith("BAD"):
            found.append(f"not a CheckpointError: {said[:300]}")
        if not said and self.number not in have:
            found.append("nothing was said, and it is not saved")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)
                newest = latest(self.folder)
                restored = {n: run.digest(restore(self.folder, self.step, number=n)) for n in have}
        except Exception as error:
            return [*found, f"afterwards {type(error).__name__}: {error}"]
        if newest is None or newest.number != max(have):
            found.append(f"the newest is {newest and newest.number}, and complete are {sorted(have)}")
        wrong = [number for number in have if restored[number] != self.digests[number % 3]]
        return [*found, *(f"{number} is restored with other numbers" for number in wrong)]


def full_disk(tell, kind: str, folder: str, filler: str) -> None:
    """Saves where 0, 1, 2, … blocks are left on the disk, until there are enough; in between with the disk free."""
    saver, filler_path = Saver(kind, Path(folder)), Path(filler)
    for blocks in range(10_000):
        disk = os.statvfs(folder)
        with open(filler_path, "wb") as file:
            file.truncate(0)
            os.posix_fallocate(file.fileno(), 0, (disk.f_bavail - blocks) * disk.f_frsize)
        said = saver.save()
        tell("case", [f"{blocks} blocks left: {said[:200] or 'saved'}", saver.complaints(said)])
        filler_path.unlink()
        if not said:
            break
        if blocks % 8 == 7 and (said := saver.save()):
            tell("case", ["the disk is free again", [f"still: {said}"]])


def failing_operations(tell, kind: str, folder: str, code: int) -> None:
    """Saves while the first, second, … operation on a file fails, until none is left that can."""
    saver, hook = Saver(kind, Path(folder)), FileHook(Path(folder), writing=True)

    def fail():
        hook.at = None
        raise OSError(code, os.strerror(code))

    for number in range(1, 1000):
        hook.at = (hook.seen + number, fail)
        said, failed, hook.at = saver.save(), hook.at is None, None
        if not failed:
            break
        name = f"operation {number}: {said[:200] or 'saved'}"
        tell("case", [name, saver.complaints(said)])
        if again := saver.save():
            tell("case", ["the next save", [f"still fails: {again}"]])


def refused(tell, kind: str, folder: str) -> None:
    """Restores from a folder that cannot be written, and tries to save into it."""
    step, found, before = run.step_of(kind), [], content(Path(folder))
    with warnings.catch_warnings(record=True) as said:
        state = restore(folder, step)
    tell("restored", run.digest(state))
    found += [f"a warning: {w.message}" for w in said if issubclass(w.category, CheckpointWarning)]
    try:
        save(folder, state, number=1000)
        found.append("nothing was said")
    except CheckpointError as error:
        if folder not in str(error):
            found.append(f"the error does not name the folder: {error}")
    except Exception as error:
        found.append(f"not a CheckpointError: {type(error).__name__}: {error}")
    if content(Path(folder)) != before:
        found.append("files changed")
    tell("case", [f"{folder}, which cannot be written", found])


@contextlib.contextmanager
def mounted(path: Path, *options: str) -> Iterator[bool]:
    """Something mounted at a path, where this machine lets us."""
    path.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(["mount", *options, str(path)], capture_output=True, check=False).returncode == 0
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "-l", str(path)], check=True)


class Case(NamedTuple):
    """Something done to a disk: of which kind, exactly what and what was said, and what is wrong with that."""

    kind: str
    name: str
    wrong: list[str]
    left_out: bool = False


def cases(kind: str, folder: Path) -> Iterator[Case]:
    """All cases, with a kind of run."""
    for code in (errno.ENOSPC, errno.EIO):
        process = start(failing_operations, kind, str(folder / errno.errorcode[code]), code)
        yield from _told(f"{errno.errorcode[code]} at one file operation", process)
    with mounted(folder / "tmpfs", "-t", "tmpfs", "-o", "size=16m", "none") as done:
        full = "a full disk (tmpfs)"
        if done:
            D, filler = str(folder / "tmpfs" / "D"), str(folder / "tmpfs" / "filler")
            yield from _told(full, start(full_disk, kind, D, filler))
        else:
            yield Case(full, "nothing can be mounted here", [], left_out=True)
    saved = folder / "saved"
    digests = unhindered(run.three, kind, str(saved), 0).value("digests")
    with mounted(folder / "read-only", "--bind", "-o", "ro", str(saved)) as done:
        read_only = "a read-only file system (bind mount)"
        if done:
            yield from _told(read_only, start(refused, kind, str(folder / "read-only")), digests["3"])
        else:
            yield Case(read_only, "nothing can be mounted here", [], left_out=True)
    others = "a folder of another user"
    if os.getuid() == 0:

        def prepare():
            run.prepare(kind)
            run.digest(restore(saved, run.step_of(kind)))  # what is imported late must be there before
            os.setuid(NOBODY)

        for parent in (folder, folder.parent):  # a temporary one is its owner's alone
            parent.chmod(0o755)
        yield from _told(others, Forked(refused, kind, str(saved), prepare=prepare), digests["3"])
    else:
        yield Case(others, "only root can be another user", [], left_out=True)
    yield from vanishing(kind, folder)
    yield from two_at_once(kind, folder / "two")


def _told(what: str, process: Forked, restored: str | None = None) -> Iterator[Case]:
    ended = process.end(600)
    yield from (Case(what, *event.value) for event in process.all("case"))
    if ended != "ended":
        yield Case(what, "the process", [f"{ended}: {process.output()[-1500:]}"])
    if process.value("restored") != restored:
        yield Case(what, "what is restored", ["is not what was saved"])


def vanishing(kind: str, folder: Path) -> Iterator[Case]:
    """A folder that is renamed, or replaced by a file, during a run."""
    for how in ("renamed", "replaced by a file"):
        path, away = folder / f"vanishing {how}", folder / f"away {how}"
        process = start(run.train, kind, str(path), 1)
        while not complete(path) and not process.all("over"):
            process.until("over", 0.01)
        path.rename(away)
        if how != "renamed":
            path.write_text("a file")
        ended, found = process.end(), []
        error = process.value("error", "")
        if ended == "failed":
            if not error.startswith("CheckpointError") or str(path) not in error:
                found.append(f"no CheckpointError that names the folder: {error[:300]}")
        elif ended != "ended" or run.WINDOWS not in complete(path):
            found.append(f"it {ended}, and complete are {sorted(complete(path))}")
        yield Case(f"a folder {how} during a run", error[:200] or ended, found)


def two_at_once(kind: str, folder: Path) -> Iterator[Case]:
    """A second run in a folder where one is running is refused; once the first is killed it goes on from there."""
    first, found = start(run.hold, kind, str(folder)), []
    first.until("holds", 120)
    before = content(folder)
    second = start(run.train, kind, str(folder), 1)
    ended, error = second.end(), second.value("error", "")
    if ended != "failed" or not error.startswith("CheckpointError") or str(first.pid) not in error:
        found.append(f"the second {ended}: {error[:300]}")
    if content(folder) != before:
        found.append("files changed")
    yield Case("two runs in one folder", error[:200], found)
    first.end(kill_after=0)
    third = start(run.train, kind, str(folder), 1)
    ended, windows = third.end(), third.all("window")
    good = ended == "ended" and bool(windows) and windows[0].value == 3
    yield Case("the lock of a killed run", ended, [] if good else [f"the next one {third.value('error')}"])
