"""`explain_oom`: from a text to an `OomExplanation`."""

import dataclasses
import io
import os
import re
from collections.abc import Sequence
from typing import BinaryIO

from jaxmem._source import is_library
from jaxmem._units import format_bytes
from jaxmem.analysis.oom._advice import advise
from jaxmem.analysis.oom._buffers import buffers_in, program_in
from jaxmem.analysis.oom._events import Episode, Event, events_in, fatal, is_no_failure
from jaxmem.analysis.oom._lines import Line, lines_in, plain_file
from jaxmem.analysis.oom._numbers import facts_in, statistics_in
from jaxmem.analysis.oom._records import OomExplanation, OomFact
from jaxmem.errors import InputError

_BEFORE, _AFTER = 2**16, 2**20  # bytes read round a report: a traceback before, a dump after
_SHORTLY = 50  # lines between the allocator's statistics and the error that they belong to
# A frame of a traceback: Python's own, and IPython's 'File ~/net.py:90, in f(x)' and 'Cell In[3], line 12, in f(x)'.
_FRAME = re.compile(
    r'File "([^"]{1,1000})", line (\d{1,9})(?:, in (\S{1,200}))?'
    r"|(?:File |^)([~/\w.<][^\s:,]{0,500}\.py):(\d{1,9}),? in (\w{1,200})"
    r"|(Cell In ?\[\d{1,6}\]), line (\d{1,9})(?:, in (\w{1,200}))?"
)
_START = "Traceback (most recent call last)"


class NoOomFound(InputError):
    """A text in which nothing reports an out-of-memory."""


def explain_oom(text_or_path: str | bytes | os.PathLike | BinaryIO) -> OomExplanation:
    """Says what ran out of memory, by how much, because of which buffers, and what to try first.

    Of several out-of-memories it is the one that ended the program. Prefixes of launchers and loggers are no hindrance,
    and an allocator's warning that says itself that it is no failure is none.

    Args:
      text_or_path: the text itself; or an `os.PathLike`, or a str without a line break that names a file; or an
        open binary stream. A file is read in pieces, whatever its size.

    Raises:
      InputError: the file cannot be read, or nothing in the text reports an out-of-memory.

    >>> said = explain_oom("Attempting to allocate 4.00G. That was not possible. There are 1.50G free.")
    >>> said.backend, said.requested_bytes, said.missing_bytes
    ('tpu', 4294967296, 2684354560)
    """
    if isinstance(text_or_path, str) and not _names_a_file(text_or_path):
        text_or_path = text_or_path.encode("utf-8", "replace")
    if isinstance(text_or_path, bytes):
        return _explain(io.BytesIO(text_or_path), "a text")
    if not isinstance(text_or_path, str | os.PathLike):
        return _explain(text_or_path, "the stream")
    name = os.fspath(text_or_path)
    try:
        with open(text_or_path, "rb") as stream:
            return _explain(stream, name)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(wanted=f"a log file at {name!r}", got=str(reason), do="Give the path of one.") from None


def _names_a_file(text: str) -> bool:
    return "\n" not in text and len(text) < 4096 and "\0" not in text and os.path.exists(text)


def _explain(stream: BinaryIO, name) -> OomExplanation:
    with plain_file(stream) as file:
        events, harmless = events_in(file)
        if not events:
            warned = f", only {harmless} warning(s) that say that they are no failure" if harmless else ""
            raise NoOomFound(
                wanted="a text that reports an out-of-memory of JAX, XLA, CUDA, Python or the kernel",
                got=f"none in {name}{warned}",
                do="Give the log from the first error on, with stderr in it (command 2>&1 | tee log).",
            )
        return _read(fatal(events, file), harmless, file)


def _read(episode: Episode, harmless: int, file: BinaryIO) -> OomExplanation:
    first, form = episode.first, episode.first.form
    before, lines = _lines_round(episode, file)
    facts = facts_in(lines)
    if not any(fact.name in ("limit", "in_use") for fact in facts):
        facts = _merged(statistics_in(before[-_SHORTLY:]), facts)
    said = {fact.name: fact.size_bytes for fact in facts}
    limit, in_use = said.get("limit"), said.get("in_use")
    free = said.get("free", limit - in_use if limit is not None and in_use is not None and limit >= in_use else None)
    explanation = OomExplanation(
        kind=form.kind,
        backend=form.backend,
        memory=form.memory,
        when=form.when,
        requested_bytes=said.get("requested"),
        used_bytes=said.get("used", in_use if in_use is not None else said.get("resident")),
        limit_bytes=limit,
        free_bytes=free,
        program=program_in(lines),
        headline=first.line.text.strip()[:500],
        line=first.line.number,
        where=_user_frame([line.text for line in before], [line.text for line in lines]),
        facts=facts,
        buffers=buffers_in(lines),
        repeats=episode.repeats,
        others=episode.others,
    )
    explanation = dataclasses.replace(explanation, notes=_notes(explanation, harmless))
    return dataclasses.replace(explanation, advice=advise(explanation))


def _lines_round(episode: Episode, file: BinaryIO) -> tuple[list[Line], list[Line]]:
    """The process's own lines before the first report, and from there to what follows the last one."""
    first, last = episode.first, episode.last

    def read(start: int, end: int, at: Event) -> list[Line]:
        """Lines of these bytes, which end or begin at a report."""
        file.seek(start)
        data = file.read(max(end - start, 0))
        number = at.line.number - (data.count(b"\n") if start < at.start else 0)
        lines = lines_in(data, number)
        return [line for line in lines if line.who in (first.line.who, "") and not is_no_failure(line.text)]

    before = read(max(episode.before, first.start - _BEFORE), first.start, first)
    lines = read(first.start, min(first.start + _AFTER, episode.after), first)
    if last.start > first.start + _AFTER:  # the allocator's dump is long, and its statistics end it
        lines += read(max(last.start - _BEFORE, first.start + _AFTER), last.start, last)
        lines += read(last.start, min(last.start + _AFTER, episode.after), last)
    return before, lines


def _merged(before: Sequence[OomFact], facts: Sequence[OomFact]) -> tuple[OomFact, ...]:
    """What was asked for first, then the allocator's statistics."""
    requested = [fact for fact in facts if fact.name == "requested"]
    return (*requested, *before, *[fact for fact in facts if fact not in requested])


def _notes(said: OomExplanation, harmless: int) -> tuple[str, ...]:
    notes = []
    of_a_program = said.backend in ("tpu", "gpu") and said.memory == "hbm"
    sizes = {fact.name: fact.size_bytes for fact in said.facts}
    listed = sum(buffer.size_bytes for buffer in said.buffers)
    whole = sizes.get("temporaries") or said.used_bytes or sizes.get("total") or 0
    if asked := said.requested_buffer:
        what = " of ".join(filter(None, (asked.shape, asked.layer or asked.op_name, asked.source)))
        notes.append(f"The buffer of the size that was asked for is listed: {what or asked.label} (line {asked.line}).")
    elif said.requested_bytes and said.requested_bytes == sizes.get("temporaries"):
        notes.append("What was asked for is all of the program's temporary buffers in one piece.")
    if of_a_program and not said.buffers:
        notes.append("The text lists no buffers: `jaxmem analyze` on the same step does, without the device.")
    elif of_a_program and said.kind == "tpu_compile" and listed < whole / 2:
        notes.append(f"The list is partial: its buffers hold {format_bytes(listed)} of {format_bytes(whole)}.")
    if said.kind == "killed":
        notes.append("A killed process, or exit code 137, is most often the host's memory; the text does not say.")
    if said.requested_bytes is None and said.used_bytes is None:
        notes.append("The text does not say how much was wanted.")
    if harmless:
        notes.append(f"Left out: {harmless} warning(s) that say themselves that they are no failure.")
    return tuple(notes)


def _user_frame(before: Sequence[str], after: Sequence[str]) -> str:
    """The user's own line, `train.py:12 in step`, of the traceback that ends in the error; empty where there is none.

    The traceback before the error counts first: Python writes it above the message. One that follows
    (the message came from a log line of the runtime) is the fallback.

    >>> _user_frame(["Traceback (most recent call last):", '  File "/home/me/train.py", line 12, in step'], [])
    'train.py:12 in step'
    """
    start = max((i for i, line in enumerate(before) if _START in line), default=0)
    follows = next((i for i, line in enumerate(after) if _START in line), len(after))
    return _last_frame(before[start:]) or _last_frame(after[follows : follows + 1000])


def _last_frame(lines: Sequence[str]) -> str:
    for line in reversed(lines):
        if found := _FRAME.search(line):
            path, number, function = next(found.group(i, i + 1, i + 2) for i in (1, 4, 7) if found[i])
            if not is_library(path):
                name = path.replace("\\", "/").rpartition("/")[2]
                return f"{name}:{number}" + (f" in {function}" if function else "")
    return ""
