"""A text of any size in one pass: the headlines in it, and the bytes round the first one.

Nothing here grows with the text: it is read in pieces, words are searched as bytes, and a line is looked at
only near such words.
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
_MOST_SIGNATURES = 10_000
_ANSI = re.compile(r"\x1b\[[0-9;?]{0,32}[@-~]")

Signature = tuple[MemoryName, int | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """The first headline of a text.

    Args:
      headline, memory: what it is; `text` the line, without colours.
      line: its number, from 1.
      before, after: the text round it; `after` starts with the headline's own line.
      repeats, others: further headlines that say the same, and other out-of-memories.
    """

    headline: Headline
    memory: MemoryName
    text: str
    line: int
    before: str
    after: str
    repeats: int
    others: int


def clean(data: bytes) -> str:
    """Text without colours and carriage returns; what is not UTF-8 becomes a replacement character."""
    text = data.decode("utf-8", "replace")
    return _ANSI.sub("", text).replace("\r", "") if "\x1b" in text or "\r" in text else text


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
        held += piece
        # A line is held back until it is whole, unless it is longer than any line of these formats.
        cut = max(held.rfind(b"\n") + 1, len(held) - 2 * _RIGHT)
        search.feed(held, cut)
        held = held[cut:]
    search.feed(held, len(held))
    return search.result()


class _Search:
    def __init__(self, headlines: Sequence[Headline], numbers: Sequence[Number]):
        self.requested = [n for n in numbers if n.name in ("requested", "used")]
        # Bytes are matched first: most lines near a trigger are none, and decoding them costs more than the match.
        self.by_trigger: dict[bytes, list[tuple[re.Pattern[bytes], Headline]]] = {}
        for headline in headlines:
            raw = re.compile(headline.pattern.pattern.encode())
            self.by_trigger.setdefault(headline.trigger.encode(), []).append((raw, headline))
        self.lines = 0
        self.before, self.after = b"", bytearray()
        self.found: tuple[Headline, MemoryName, str, int] | None = None
        self.signature: Signature | None = None
        self.repeats = 0
        self.other: set[Signature] = set()

    def feed(self, data: bytes, cut: int) -> None:
        """Looks at the lines that start a match before `cut`; the rest is fed again."""
        events = sorted(self._events(data, cut), key=lambda event: event[0])
        start = 0
        last_end = -1
        for position, end, headline, match, text in events:
            if position < last_end:  # two triggers in one line are one report
                continue
            last_end = end
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
            elif len(self.other) < _MOST_SIGNATURES and not any(_same(signature, s) for s in list(self.other)[:64]):
                self.other.add(signature)
        if self.found is None:
            self.before = (self.before + data[:cut])[-BEFORE:]
        elif len(self.after) < AFTER:
            self.after += data[start : min(max(cut, start), start + AFTER - len(self.after))]
        self.lines += data.count(b"\n", 0, cut)

    def _events(self, data: bytes, cut: int):
        for trigger, headlines in self.by_trigger.items():
            position = data.find(trigger, 0, cut + len(trigger) - 1)
            while position >= 0:
                left = max(position - _LEFT, 0)
                left = max(data.rfind(b"\n", left, position) + 1, left)
                right = data.find(b"\n", position, position + _RIGHT)
                right = right if right >= 0 else min(position + _RIGHT, len(data))
                line = data[left:right]
                plain = b"\x1b" not in line and b"\r" not in line
                for raw, headline in headlines:
                    if plain and not raw.search(line):
                        continue
                    text = clean(line)
                    if match := headline.pattern.search(text):
                        yield position, right, headline, match, text
                        break
                position = data.find(trigger, right, cut + len(trigger) - 1)

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
            before=clean(self.before),
            after=clean(bytes(self.after)),
            repeats=self.repeats,
            others=len(self.other),
        )


def _same(one: Signature, two: Signature) -> bool:
    """Same memory, and the same request but for rounding: the allocator, XLA and Python each report it."""
    if one[0] != two[0] or one[1] is None or two[1] is None:
        return one[0] == two[0]
    return abs(one[1] - two[1]) <= 0.02 * max(one[1], two[1])
