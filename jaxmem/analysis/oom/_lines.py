"""A log's lines as the program wrote them, and the process that did.

Taken away are colours, what a progress bar overwrote, JSON round a message, and what launchers (Ray, Slurm, MPI,
torchrun, docker, Kubernetes, journald) and loggers (absl, Python's, loguru) put in front.
"""

import codecs
import json
import re
import tempfile
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple, cast

_MESSAGES = frozenset({"log", "message", "msg", "MESSAGE", "textPayload", "text", "event"})  # keys of JSON logs
_LONGEST, _MOST = 8192, 20_000  # letters of a line; lines of a text
_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d{1,9})?(?:Z|[+-]\d\d:?\d\d)?"
_LEVEL = r"(?:DEBUG|INFO|WARN(?:ING)?|ERROR|CRITICAL|FATAL|[IWEF])"
_PREFIX = re.compile(
    rf"""\s*(?:
      (?:{_TIME}:?|[IWEF]\d{{4}}\ \d\d:\d\d:[\d.]+)(?:\s+{_LEVEL}\b)?(?:\s+\d+)?(?:\s+\S{{1,200}}\.\w+:\d+\])?
        (?:\s\|\s{_LEVEL}\s*\|\s\S{{1,200}}\s-|\s-\s\S{{1,99}}\s-\s{_LEVEL}\s-|\sstd(?:out|err)\s[FP])?
    | \[{_TIME}[^][]{{0,60}}\](?:\[[^][]{{0,99}}\]){{0,4}}(?:\s-)?
    | [A-Z][a-z]\w\s{{1,2}}\d{{1,2}}\ \d\d:\d\d:\d\d\ (?P<syslog>\S{{1,99}}\ [^\s:]{{1,99}}):
    | \[\ *\d{{1,9}}\.\d{{1,9}}\]
    | {_LEVEL}\ \d\d-\d\d\ \d\d:\d\d:\d\d\ \[\S{{1,99}}:\d+\]
    | {_LEVEL}:[\w.]{{1,99}}:
    | (?P<who>\([^()]{{0,99}}\bpid=\d*[^()]{{0,99}}\)
        | \[[^][]{{0,9}}(?:rank|proc|host|worker|default|pod/)[^][]{{0,99}}\]:?
        | \[\d{{1,6}},\d{{1,6}}\]<std\w{{2,4}}>: | \[\d{{1,5}}\](?=\s)
        | \d{{1,5}}:(?=\s) | \w[\w.\-]{{0,59}}\ {{0,20}}\|(?=\s))
    )\ ?""",
    re.X,
)
_WARNING = re.compile(r"(?:^|\s)[WI](?:\d{4} |\s+\S{1,200}\.\w+:\d+\])")
_ANSI = re.compile(rb"\x1b(?:\[[0-9;?]{0,32}[@-~]|\][^\x07\x1b]{0,200}(?:\x07|\x1b\\))")
_DRIVE = re.compile(r'"[A-Za-z]:\\')  # of a path on Windows, whose parts may begin with n and t
_PIECE = 2**24


def plain_file(stream: BinaryIO) -> BinaryIO:
    """A copy of `stream`, on disk if it is large, without colours; UTF-16 with its mark, as PowerShell's, converted."""
    copy = tempfile.SpooledTemporaryFile(max_size=2**26)  # noqa: SIM115 - the caller closes it
    decoder = None
    while piece := stream.read(_PIECE):
        if copy.tell() == 0 and piece[:2] in (b"\xff\xfe", b"\xfe\xff"):
            decoder = codecs.getincrementaldecoder("utf-16")("replace")
        if decoder is not None:
            piece = decoder.decode(piece).encode("utf-8", "replace")
        else:
            piece += stream.readline(_LONGEST)
        copy.write(_ANSI.sub(b"", piece) if b"\x1b" in piece else piece)
    copy.seek(0)
    return cast(BinaryIO, copy)


class Line(NamedTuple):
    """`number`: from 1; `who`: the process, as its launcher names it, or ""; `text`: without what stood in front."""

    number: int
    who: str
    text: str
    is_warning: bool = False


def lines_in(data: bytes, number: int) -> Iterator[Line]:
    r"""The lines of `data`, whose first has this `number`; one of the log may hold several of the program.

    >>> for line in lines_in(b'(w pid=7, ip=1.2.3.4) E0302 10:11:12.1 9 a.cc:7] Ran out\n{"msg": "one\\n two"}', 1):
    ...     print(line)
    Line(number=1, who='(w pid=7, ip=1.2.3.4)', text='Ran out', is_warning=False)
    Line(number=2, who='', text='one', is_warning=False)
    Line(number=2, who='', text=' two', is_warning=False)
    """
    left = _MOST
    for index, raw in enumerate(data.split(b"\n", _MOST)[:_MOST]):
        for part in re.split(r"\r|\n", _message(raw.decode("utf-8", "replace")), maxsplit=left)[:left]:
            left -= 1
            yield _line(number + index, part[:_LONGEST])


def _line(number: int, text: str) -> Line:
    at, who = 0, []
    while at < len(text) and (found := _PREFIX.match(text, at)):
        at = found.end()
        who += [name for name in (found["who"], found["syslog"]) if name]
    return Line(number, " ".join(who), text[at:], bool(_WARNING.search(text[:at])))


def _message(text: str) -> str:
    """The message of a JSON object, or the longest text in it; else `text`, with the escapes of one that was cut."""
    if text.lstrip().startswith("{"):
        try:
            return max(_texts(json.loads(text)), default=(False, 0, ""))[2].rstrip("\n")
        except (ValueError, RecursionError):
            pass
    if "\\" not in text or _DRIVE.search(text):
        return text
    return text.replace("\\n", "\n").replace("\\t", "\t").replace('\\"', '"')


def _texts(value, key: object = "") -> Iterator[tuple[bool, int, str]]:
    if isinstance(value, str):
        yield key in _MESSAGES, len(value), value
    elif isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(inner, name)
