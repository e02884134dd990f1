"""The reports of an out-of-memory in a text of any size, and which of them ended the program.

A report is found by fixed words, with `bytes.find`, so that Python's own loops run once a report and not once a line.
"""

import dataclasses
import re
from collections.abc import Iterator, Sequence
from typing import BinaryIO

from jaxmem.analysis.oom._lines import Line, lines_in
from jaxmem.analysis.oom._numbers import requested_in
from jaxmem.analysis.oom._records import Backend, MemoryName, When

MOST_REPORTS = 250  # of a form in a piece, then those at its end; a log with more says nothing new
_PIECE = 2**24
_LEFT, _RIGHT = 512, 2048  # bytes of a line looked at round a form's words
_RETRIED, _RAISED = 2, 3  # what an allocator warns of may be tried again; 1 is a process that only was killed

# After "exit", "exited", "returned": a code or status of 137. Possessive repeats (`?+`) never backtrack, so that
# whole logs of "exited with code 1" pass quickly.
_STATUS = (
    r"(?:ed|s)?+(?: with)?+(?: exit| an exit| a)?+(?:[ _\-]?[Cc]ode|[ _\-]?[Ss]tatus)?+[\"']?+"
    r" {0,8}+[:=]?+ {0,8}+\(?+(?<=[ =:(])137\b"
    r"(?! (?:errors?|failures?|warnings?|tests?|problems?|issues?|items?|results?|rows?|values?)\b)"
)
_BREAK = re.compile(rb"[\r\n]|\\n")  # a JSON log has the last
_HARMLESS = b"this is not a failure"
_NO_FAILURE = (_HARMLESS.decode(), "Suppressing OOM", "Suppressing scoped allocation OOM")


@dataclasses.dataclass(frozen=True)
class Form:
    """How a report looks.

    Args:
      weight: how surely it ended the program.
      pattern: what must match within a line. It is searched in megabytes of bytes and has to be fast on what nearly
        matches: it begins with fixed words (what stands before them is asked for by a lookbehind after them), and
        repeats nothing without a bound. A group `space` or `pool` tells the memory.
    """

    kind: str
    backend: Backend
    memory: MemoryName
    when: When
    weight: int
    pattern: str

    @property
    def words(self) -> str:
        """Those that the pattern begins with; where they are not, nothing else is looked for."""
        found = re.match(r"(?:[\w/:' \-]|\\[.()])+", self.pattern)
        return found[0].replace("\\", "") if found else ""


def _forms(backend: Backend, memory: MemoryName, when: When, *rows: tuple[str, int, str]) -> tuple[Form, ...]:
    return tuple(Form(kind, backend, memory, when, weight, pattern) for kind, weight, pattern in rows)


FORMS = (
    *_forms(
        "tpu", "hbm", "compile",
        ("tpu_compile", 3, r"Ran out of memory in memory space (?P<space>[a-z]{1,10})"),
        ("tpu_compile", 3, r"Ran out of memory on HBM, the total memory"),
        ("tpu_compile", 3, r"Aborting compilation early because it's unlikely to have"),
        ("tpu_scoped", 3, r"Scoped allocation with size .{1,20} and limit .{1,20} exceeded scoped (?P<space>\w{1,10})"),
        ("tpu_scoped", 3, r"Allocation \(size=\d{1,20}\) would exceed memory(?:.{0,400}?space=(?P<space>\w{1,10}))?"),
    ),
    *_forms(
        "tpu", "hbm", "run",
        ("tpu_run", 3, r"Attempting to allocate \d[^ ]{0,20}\. That was not possible"),
        ("tpu_run", 3, r"Could not allocate \d{1,20} bytes in memory \w{1,40}HBM"),
        ("tpu_load", 3, r"Attempting to reserve \d[^ ]{0,20} at the bottom of memory"),
    ),
    *_forms(
        "gpu", "host", "run",
        ("pinned", 2, r"failed to alloc \d{1,20} bytes on host"),
        ("pinned", 2, r"could not allocate pinned host memory of size"),
        ("pinned", 3, r"ailed to allocate \S{1,20} \(\d{1,20} bytes\) of (?:pinned )?host memory"),
        ("pinned", 3, r"Failed to allocate a \d{1,20}-byte pinned host staging"),
        ("pinned", 3, r"Failed to allocate \d{1,20} bytes for host offloading"),
        ("pinned", 3, r"OOM in pinned host allocator"),
    ),
    *_forms(
        "gpu", "hbm", "run",
        ("gpu_bfc", 2, r"Allocator \((?P<pool>[^)\n]{1,40})\) ran out of memory trying to allocate \d"),
        ("gpu_bfc", 3, r"ut of memory while trying to allocate \d"),
        ("gpu_bfc", 3, r"Failed to allocate request for \d"),
        ("gpu_graph", 3, r"Underlying backend ran out of memory trying to instantiate"),
        ("gpu_driver", 2, r"CUDA_ERROR_OUT_OF_MEMORY"),
        ("gpu_driver", 2, r"cuMemAllocAsync failed to allocate \d"),
        ("gpu_driver", 3, r"cudaErrorMemoryAllocation"),
        ("gpu_driver", 3, r"hipErrorOutOfMemory"),
        ("gpu_library", 2, r" to allocate (?<=(?:ailed|nable) to allocate )[\w\- ]{0,60}scratch"),
        ("gpu_library", 3, r"_STATUS_ALLOC_FAILED(?<=[A-Z]_STATUS_ALLOC_FAILED)"),
        ("gpu_library", 3, r"CUDA out of memory\. Tried to allocate"),
        ("gpu_library", 3, r"Cuda failure[^'(\n]{0,20}['(]out of memory"),
        ("gpu_library", 3, r"CUDA error[ \d:]{0,8}['(]?out of memory"),
        ("gpu_library", 3, r"Failed to CUDA (?:c|m|host )alloc\b"),
    ),
    *_forms("cpu", "host", "run", ("cpu_xla", 3, r"Out of memory allocating \d{1,20} bytes")),
    *_forms(
        "host", "host", "run",
        ("python_memory", 3, r"Unable to allocate \d[\d.]{0,20} ?\w{1,6} for an array with shape"),
        ("python_memory", 3, r"MemoryError(?:(?<=^MemoryError)|(?<=[\s\].]MemoryError)|(?<=^_ArrayMemoryError)"
         r"|(?<=[\s\].]_ArrayMemoryError))(?::|[ \t\r]{0,4}$)"),
        ("python_memory", 3, r"Errno 12\] Cannot allocate memory"),
        ("cpp_memory", 3, r"std::bad_alloc"),
        ("cpp_memory", 3, r"Failed to malloc \d"),
        ("kernel_cgroup", 3, r"emory cgroup out of memory"),
        ("kernel_kill", 3, r"ut of memory: Kill(?<!group out of memory: Kill)(?:ed)? process \d"),
        ("kernel_kill", 3, r"has been killed by the OOM killer"),
        ("slurm", 3, r"oom-kill event"),
        ("slurm", 3, r"oom_kill event"),
        ("ray", 3, r"due to the node running low on memory"),
        ("container", 3, r"OOMKilled(?<=\bOOMKilled)\b(?!\W{1,4}false)"),
        ("nccl_shm", 3, r"/dev/shm/nccl[\w\-]{0,60} to \d{1,20} bytes"
         r"|/dev/shm/nccl[^\n]{0,200}(?:No space left on device|Cannot allocate memory)"),
        # a shell's "line 3: 1234 Killed   python train.py", and a worker "killed by signal: Killed."
        ("killed", 1, r"Killed(?:(?<=^Killed)|(?<=[\d:\])|F\-] Killed)|(?<=[:>\]]Killed))"
         r"(?: {2,60}\S|\.?[ \t\r]{0,40}$)"),
        ("killed", 1, r"xit(?<=[Ee]xit)" + _STATUS),
        ("killed", 1, r"eturn(?<=[Rr]eturn)" + _STATUS),
        ("killed", 1, r"Signals\.SIGKILL"),
    ),
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Event:
    """A report: its form, the line that says it, and where in the text that is (`start` and `end` in bytes)."""

    form: Form
    line: Line
    requested: int | None
    start: int
    end: int

    @property
    def weight(self) -> int:
        """A logger's warning is less than the same words raised."""
        return min(self.form.weight, _RETRIED) if self.line.is_warning else self.form.weight

    def repeats(self, other: "Event") -> bool:
        """Same memory, and the same request but for rounding: the allocator, XLA and Python each report it."""
        one, two = self.requested, other.requested
        if self.form.memory != other.form.memory:
            return False
        return one is None or two is None or abs(one - two) <= 0.02 * max(one, two)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """The out-of-memory that ended the program.

    Args:
      first, last: its first report and its last.
      before, after: where the text of other reports lies, which is not this one's.
      repeats: its further reports; `others`: other out-of-memories of the text.
    """

    first: Event
    last: Event
    before: int
    after: int
    repeats: int
    others: int


def events_in(file: BinaryIO) -> tuple[list[Event], int]:
    """The reports of `file`, in order, and the number of those that say themselves that they are no failure."""
    compiled = [(form.words.encode(), re.compile(form.pattern.encode(), re.M), form) for form in FORMS]
    found: list[Event] = []
    harmless, base, number = 0, 0, 1
    while data := file.read(_PIECE):
        data += file.readline(_PIECE)  # cuts no line but one of megabytes
        end = at = 0
        for start, form in sorted(_matches(data, compiled), key=lambda match: match[0]):
            if start < end:  # two matches in one line are one report
                continue
            if form is None:
                harmless, end = harmless + 1, _end(data, start)
                continue
            number += data.count(b"\n", at, start)
            at, end = start, _end(data, start)
            event = _event(form, data, start, number, base)
            if event is not None and is_no_failure(event.line.text):
                harmless += 1
            elif event is not None:
                found.append(event)
        number += data.count(b"\n", at)
        base += len(data)
    return found, harmless


def is_no_failure(text: str) -> bool:
    """Whether a line says itself that what it reports is none."""
    return any(words in text for words in _NO_FAILURE)


def _matches(data: bytes, compiled) -> Iterator[tuple[int, Form | None]]:
    for words, pattern, form in compiled:
        if data.find(words) < 0:
            continue
        position, left = 0, MOST_REPORTS
        while match := pattern.search(data, position):
            position = max(_end(data, match.start()), match.end())
            is_harmless = data.find(_HARMLESS, match.start(), position) >= 0
            yield match.start(), None if is_harmless else form
            left -= not is_harmless
            if not left:  # go on near the end
                position, left = max(position, len(data) - 2**14), -1


def _end(data: bytes, start: int) -> int:
    found = _BREAK.search(data, start, start + _RIGHT)
    return found.start() if found else min(start + _RIGHT, len(data))


def _event(form: Form, data: bytes, at: int, number: int, base: int) -> Event | None:
    """The report that a match at `at` begins; None where a byte that is no UTF-8 has become a letter."""
    left = max(at - _LEFT, 0)
    start = max([left, *(found.end() for found in _BREAK.finditer(data, left, at))])
    end = _end(data, at)
    line = next(iter(lines_in(data[start:end], number)))
    match = re.search(form.pattern, line.text)
    if match is None:
        return None
    found = match.groupdict()
    space, pool = (found.get("space") or "").lower(), (found.get("pool") or "").lower()
    kind, memory = form.kind, space if space in ("vmem", "smem") else form.memory
    if "host" in pool or "cpu" in pool:  # the allocators of pinned and of plain host memory are of the same sort
        kind, memory = "pinned" if "host" in pool else "cpu_xla", "host"
    return Event(
        form=dataclasses.replace(form, kind=kind, memory=memory),
        line=line,
        requested=requested_in(line.text),
        start=base + start,
        end=base + end,
    )


def fatal(events: Sequence[Event], file: BinaryIO) -> Episode:
    """The out-of-memory that ended the program.

    Of the reports that surely end a program it is the last one of the process that reported first. Those before were
    caught, unless a traceback leads from them to the last. It begins with the first report of the same request, or of
    a larger one: a pool that the driver refuses is asked for again with less.
    """
    heaviest = max(event.weight for event in events)
    who = next(event.line.who for event in events if event.weight == heaviest)
    own = [event for event in events if event.line.who == who]
    last = max(index for index, event in enumerate(own) if event.weight == heaviest)
    first = last
    while first:
        above, event = own[first - 1], own[first]
        if not (above.repeats(own[last]) or above.form.kind == event.form.kind == "gpu_driver"):
            if not _leads_to(above, event, file):
                break
            last = first - 1
        first -= 1
    start, end = own[first].start, own[last].start
    other: list[Event] = []
    repeats = -1
    for event in events:
        if (
            event.repeats(own[first])
            or event.repeats(own[last])
            or (event.line.who == who and start < event.start < end)
        ):
            repeats += 1
        elif len(other) < 64 and not any(event.repeats(found) for found in other):
            other.append(event)
    return Episode(
        first=own[first],
        last=own[last],
        before=own[first - 1].end if first else 0,
        after=next((event.start for event in own[last + 1 :] if not event.repeats(own[last])), 2**62),
        repeats=repeats,
        others=len(other),
    )


def _leads_to(one: Event, two: Event, file: BinaryIO) -> bool:
    """Whether Python says that the second was raised because of, or while handling, the first."""
    if one.weight < _RAISED or two.weight < _RAISED:
        return False
    start = max(one.end, two.start - 2**16)
    file.seek(start)
    between = file.read(max(two.start - start, 0))
    return b"During handling of the above exception" in between or b"the direct cause of the following" in between
