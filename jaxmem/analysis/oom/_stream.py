"""A text of any size in one pass: the headlines in it, and the bytes round the first one.

Nothing here grows with the text: it is read in pieces, and Python's own loops run once a match, not once a line
or once a word that looks like one.
"""

import codecs
import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from jaxmem.analysis.oom._formats import Headline, Number, size_in
from jaxmem.analysis.oom._records import MemoryName

BEFORE, AFTER = 2**16, 2**20  # bytes kept round the first headline: a traceback before, a dump after
_LEFT, _RIGHT = 512, 2048  # bytes of a line looked at round a trigger
_PIECE = 2**20
MOST_REPORTS = 5_000  # matches looked at; a log with more of them says nothing new
_ANSI = re.compile(rb"\x1b\[[0-9;?]{0,32}[@-~]")

Signature = tuple[MemoryName, int | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The first headline of a text.

    Args:
      headline, memory: what it is; `text` the line, without colours.
      line: its number, from 1.
      before, after: the text round it; `after` starts with the headline's own line.
      repeats, others: further headlines that say the same, and other out-of-memories; together at most
        `MOST_REPORTS`.
    """

    headline: Headline
    memory: MemoryName
    text: str
    line: int
    before: str
    after: str
    repeats: int
    others: int


def plain(data: bytes) -> bytes:
    """`data` without colours and carriage returns."""
    if b"\x1b" in data:
        data = _ANSI.sub(b"", data)
    return data.replace(b"\r", b"") if b"\r" in data else data


def pieces(stream) -> Iterator[bytes]:
    """A binary stream in pieces of UTF-8; UTF-16 with its mark, as PowerShell writes it, is converted."""
    first = stream.read(_PIECE)
    if first[:2] in (b"\xff\xfe", b"\xfe\xff"):
        decoder = codecs.getincrementaldecoder("utf-16")("replace")
        while first:
            yield decoder.decode(first).encode("utf-8", "replace")
            first = stream.read(_PIECE)
        return
    while first:
        yield first
        first = stream.read(_PIECE)


def find(source: Iterable[bytes], headlines: Sequence[Headline], numbers: Sequence[Number]) -> Found | None:
    """The first headline in `source`, and a count of the others; None where there is none."""
    search = _Search(headlines, numbers)
    held = b""
    for piece in source:
        held = plain(held + piece)
        # A line is held back until it is whole, unless it is longer than any line of these formats.
        cut = max(held.rfind(b"\n") + 1, len(held) - 2 * _RIGHT)
        search.feed(held, cut)
        held = held[cut:]
        if search.done:
            return search.result()
    search.feed(held, len(held))
    return search.result()


class _Search:
    def __init__(self, headlines: Sequence[Headline], numbers: Sequence[Number]):
        self.requested = [n for n in numbers if n.name in ("requested", "used")]
        self.headlines = [(h.trigger.encode(), re.compile(h.pattern.pattern.encode(), re.M), h) for h in headlines]
        self.lines = 0
        self.before, self.after = b"", bytearray()
        self.found: tuple[Headline, MemoryName, str, int] | None = None
        self.signature: Signature | None = None
        self.seen = 0
        self.repeats = 0
        self.other: set[Signature] = set()

    def feed(self, data: bytes, cut: int) -> None:
        """Looks at the matches that start before `cut`; the rest is fed again."""
        start = 0
        last_end = -1
        for position, end, headline in sorted(self._events(data, cut), key=lambda event: event[0]):
            if position < last_end or self.seen >= MOST_REPORTS:  # two matches in one line are one report
                continue
            text = _line(data, position, end)
            match = headline.pattern.search(text)
            if match is None:  # a byte that is not UTF-8 has become a letter
                continue
            last_end = end
            self.seen += 1
            memory = headline.memory_of(match) if headline.memory_of else headline.memory
            signature = (memory, self._request(text[match.start() :]))
            if self.found is None:
                start = max(data.rfind(b"\n", 0, position) + 1, position - _LEFT)
                self.found = (headline, memory, text.strip(), self.lines + data.count(b"\n", 0, position) + 1)
                self.signature = signature
                self.before = (self.before + data[:start])[-BEFORE:]
            elif self.signature is not None and _same(signature, self.signature):
                self.repeats += 1
                if self.signature[1] is None:
                    self.signature = signature
            elif not any(_same(signature, s) for s in list(self.other)[:64]):
                self.other.add(signature)
        if self.found is None:
            self.before = (self.before + data[:cut])[-BEFORE:]
        elif len(self.after) < AFTER:
            self.after += data[start : min(max(cut, start), start + AFTER - len(self.after))]
        self.lines += data.count(b"\n", 0, cut)

    @property
    def done(self) -> bool:
        """Whether nothing that follows would change the result."""
        return self.seen >= MOST_REPORTS and len(self.after) >= AFTER

    def _events(self, data: bytes, cut: int) -> Iterator[tuple[int, int, Headline]]:
        """Start, end of the line (or of what is looked at of it), and headline of every match; one a line and headline.

        All work on what does not match is done by `bytes.find` and by patterns that begin with fixed words.
        """
        for trigger, raw, headline in self.headlines:
            if data.find(trigger, 0, cut + len(trigger) - 1) < 0:
                continue
            left = MOST_REPORTS - self.seen
            match = raw.search(data)
            while match and match.start() < cut and left > 0:
                end = data.find(b"\n", match.start(), match.start() + _RIGHT)
                end = end if end >= 0 else min(match.start() + _RIGHT, len(data))
                yield match.start(), end, headline
                left -= 1
                match = raw.search(data, max(end, match.end()))

    def _request(self, text: str) -> int | None:
        for wanted in self.requested:
            if match := wanted.pattern.search(text):
                return size_in(match)
        return None

    def result(self) -> Found | None:
        if self.found is None:
            return None
        headline, memory, text, line = self.found
        return Found(
            headline=headline,
            memory=memory,
            text=text,
            line=line,
            before=self.before.decode("utf-8", "replace"),
            after=self.after.decode("utf-8", "replace"),
            repeats=self.repeats,
            others=len(self.other),
        )


def _line(data: bytes, position: int, end: int) -> str:
    """The line round `position`, from at most `_LEFT` bytes before it."""
    left = max(position - _LEFT, 0)
    return data[max(data.rfind(b"\n", left, position) + 1, left) : end].decode("utf-8", "replace")


def _same(one: Signature, two: Signature) -> bool:
    """Same memory, and the same request but for rounding: the allocator, XLA and Python each report it."""
    if one[0] != two[0] or one[1] is None or two[1] is None:
        return one[0] == two[0]
    return abs(one[1] - two[1]) <= 0.02 * max(one[1], two[1])
