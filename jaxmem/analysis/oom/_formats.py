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
      trigger: words that every such line holds; searched for as bytes, so that other lines cost nothing.
      pattern: what the line must match, searched from the 512 characters before the trigger on.
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
