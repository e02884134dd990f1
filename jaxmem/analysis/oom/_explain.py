"""`explain_oom`: from a text to an `OomExplanation`."""

import dataclasses
import io
import os
from collections.abc import Sequence
from typing import BinaryIO

from jaxmem.analysis.oom import _gpu, _host, _tpu
from jaxmem.analysis.oom._advice import advise
from jaxmem.analysis.oom._buffers import buffers_in
from jaxmem.analysis.oom._formats import size_in
from jaxmem.analysis.oom._records import OomExplanation, OomFact
from jaxmem.analysis.oom._stream import Found, find, pieces
from jaxmem.analysis.oom._traceback import innermost_user_frame
from jaxmem.errors import InputError

_BY_BACKEND = {"tpu": _tpu, "gpu": _gpu, "cpu": _host, "host": _host}
_HEADLINES = (*_tpu.HEADLINES, *_gpu.HEADLINES, *_host.HEADLINES)
_NUMBERS = (*_tpu.NUMBERS, *_gpu.NUMBERS, *_host.NUMBERS)
_LONGEST_LINE = 8192
_MOST_LINES = 20_000
_QUOTE = 200
_SHORTLY = 50  # lines between the allocator's statistics and the error that they belong to


class NoOomFound(InputError):
    """A text in which nothing reports an out-of-memory."""


def explain_oom(text_or_path: str | bytes | os.PathLike | BinaryIO) -> OomExplanation:
    """Says what ran out of memory, by how much, because of which buffers, and what to try first.

    Args:
      text_or_path: the text itself; or an `os.PathLike`, or a str without a line break that names a file; or an
        open binary stream. A file is read in pieces, whatever its size.

    Raises:
      InputError: the file cannot be read, or nothing in the text reports an out-of-memory.

    >>> said = explain_oom("Attempting to allocate 4.00G. That was not possible. There are 1.50G free.")
    >>> said.backend, said.requested_bytes, said.missing_bytes
    ('tpu', 4294967296, 2684354560)
    """
    if isinstance(text_or_path, bytes):
        return _explain(io.BytesIO(text_or_path), "a text")
    if isinstance(text_or_path, str) and not _names_a_file(text_or_path):
        return _explain(io.BytesIO(text_or_path.encode("utf-8", "replace")), "a text")
    if isinstance(text_or_path, str | os.PathLike):
        try:
            with open(text_or_path, "rb") as stream:
                return _explain(stream, os.fspath(text_or_path))
        except (OSError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            reason = getattr(error, "strerror", None) or error
            raise InputError(
                wanted=f"to read {os.fspath(text_or_path)!r}", got=str(reason), do="Give the path of a log file."
            ) from None
    return _explain(text_or_path, "the stream")


def _names_a_file(text: str) -> bool:
    return "\n" not in text and len(text) < 4096 and "\0" not in text and os.path.exists(text)


def _explain(stream: BinaryIO, name) -> OomExplanation:
    found = find(pieces(stream), _HEADLINES, _NUMBERS)
    if found is None:
        raise NoOomFound(
            wanted="a text that reports an out-of-memory of JAX, XLA, CUDA, Python or the kernel",
            got=f"none in {name}",
            do="Give the log from the first error on, with stderr in it (command 2>&1 | tee log).",
        )
    return _read(found)


def _read(found: Found) -> OomExplanation:
    headline = found.headline
    lines = _lines(found)
    facts = _merged(_statistics_before(found), _facts(lines, _BY_BACKEND[headline.backend].NUMBERS))
    said = {fact.name: fact.size_bytes for fact in reversed(facts)}  # the first of a name wins
    limit, in_use = said.get("limit"), said.get("in_use")
    free = said.get("free", limit - in_use if limit is not None and in_use is not None and limit >= in_use else None)
    explanation = OomExplanation(
        kind=headline.kind,
        backend=headline.backend,
        memory=found.memory,
        when=headline.when,
        requested_bytes=said.get("requested"),
        used_bytes=said.get("used", in_use if in_use is not None else said.get("resident")),
        limit_bytes=limit,
        free_bytes=free,
        program=_program(lines, _BY_BACKEND[headline.backend].PROGRAMS),
        headline=found.text[:500],
        line=found.line,
        where=innermost_user_frame(found.before, found.after),
        facts=facts,
        buffers=buffers_in(lines),
        repeats=found.repeats,
        others=found.others,
    )
    explanation = dataclasses.replace(explanation, notes=_notes(explanation))
    return dataclasses.replace(explanation, advice=advise(explanation))


def _lines(found: Found) -> list[tuple[int, str]]:
    """Numbered lines from the headline on; a JSON log's `\\n` within a string breaks a line too."""
    return _numbered(found.after.split("\n", _MOST_LINES)[:_MOST_LINES], found.line)


def _numbered(texts: Sequence[str], first: int) -> list[tuple[int, str]]:
    lines = []
    for index, line in enumerate(texts):
        parts = line.replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"').split("\n")
        lines += [(first + index, part[:_LONGEST_LINE]) for part in parts[:_MOST_LINES]]
    return lines[:_MOST_LINES]


def _statistics_before(found: Found) -> tuple[OomFact, ...]:
    """Limit and use of the GPU's pool from the lines before XLA's error; none where the allocator's own line is there.

    That line comes before the statistics, XLA's error after them.
    """
    if found.headline.kind != "gpu_bfc" or found.headline.trigger == _gpu.ALLOCATOR:
        return ()
    texts = found.before[-_SHORTLY * _LONGEST_LINE :].rsplit("\n", _SHORTLY)[-_SHORTLY:]
    lines = _numbered(texts, found.line - len(texts) + 1)
    facts = _facts(lines[::-1], _gpu.STATISTICS)  # the last of them
    return facts[::-1] if {"limit", "in_use"} <= {fact.name for fact in facts} else ()


def _merged(before: tuple[OomFact, ...], after: tuple[OomFact, ...]) -> tuple[OomFact, ...]:
    names = {fact.name for fact in before}
    rest = [fact for fact in after if fact.name not in names]
    return (*[fact for fact in rest if fact.name == "requested"], *before, *[f for f in rest if f.name != "requested"])


def _facts(lines, numbers) -> tuple[OomFact, ...]:
    facts: dict[str, OomFact] = {}
    waiting = list(numbers)
    for line_number, line in lines:
        if not waiting:
            break
        for wanted in list(waiting):
            match = wanted.pattern.search(line)
            if match and (size := size_in(match)) is not None:
                waiting.remove(wanted)
                quote = line[max(match.start() - 20, 0) : match.end() + 40].strip()[:_QUOTE]
                facts.setdefault(wanted.name, OomFact(name=wanted.name, size_bytes=size, line=line_number, quote=quote))
    return tuple(facts.values())


def _program(lines, patterns) -> str:
    for _, line in lines:
        for pattern in patterns:
            if match := pattern.search(line):
                return match[1]
    return ""


def _notes(said: OomExplanation) -> tuple[str, ...]:
    notes = []
    if said.backend in ("tpu", "gpu") and said.memory == "hbm" and not said.buffers:
        notes.append("The text lists no buffers: `jaxmem analyze` on the same step does, without the device.")
    if said.kind == "killed":
        notes.append("A killed process, or exit code 137, is most often the host's memory; the text does not say.")
    if said.requested_bytes is None and said.used_bytes is None:
        notes.append("The text does not say how much was wanted.")
    return tuple(notes)
