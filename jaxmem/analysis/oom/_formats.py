"""A format: its headlines, and the numbers that may stand in the lines after one."""

import dataclasses
import re
from collections.abc import Callable

from jaxmem.analysis.oom._records import Backend, MemoryName, When
from jaxmem.analysis.oom._sizes import SIZE, to_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Headline:
    """A line that reports an out-of-memory.

    Args:
      trigger: words that every match holds; where they are not, nothing else is looked for.
      pattern: what must match within a line. It is searched in a megabyte at a time, as bytes, and has to be fast on
        what nearly matches: it begins with fixed words (what stands before them is asked for by a lookbehind after
        them), and repeats nothing without a bound.
      memory_of: picks the memory from the match, where one format covers several.
    """

    kind: str
    backend: Backend
    memory: MemoryName
    when: When
    trigger: str
    pattern: re.Pattern
    memory_of: Callable[[re.Match], MemoryName] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Number:
    """A fact: its name, and a pattern whose first two groups are a size."""

    name: str
    pattern: re.Pattern


def number(name: str, pattern: str) -> Number:
    """A `Number` from a pattern in which `SIZE` marks the size.

    >>> match = number("free", r"There are SIZE free").pattern.search("There are 1.92G free")
    >>> size_in(match)
    2061584302
    """
    return Number(name=name, pattern=re.compile(pattern.replace("SIZE", SIZE)))


def size_in(match: re.Match) -> int | None:
    """Bytes of the first two groups."""
    return to_bytes(match[1], match[2])
