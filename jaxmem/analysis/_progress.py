"""What a comparison is at: a line on stderr where that is a terminal, rewritten in place; nothing elsewhere."""

import collections
import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[str, str], None]


@contextlib.contextmanager
def on_terminal(count: int) -> Iterator[Progress]:
    """A `progress` for `compare`.

    Args:
      count: of the variants.

    >>> with on_terminal(2) as tell:  # no terminal here
    ...     tell("full", "compiling")
    """
    begun: collections.Counter[str] = collections.Counter()
    shown = sys.stderr.isatty()

    def tell(name: str, stage: str) -> None:
        if shown and stage != "done":
            begun[stage] += 1
            sys.stderr.write(f"\r\x1b[Kjaxmem: {stage} {name} ({begun[stage]} of {count}) …")
            sys.stderr.flush()

    try:
        yield tell
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
