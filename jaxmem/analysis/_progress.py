"""What a comparison is at: a line on stderr where that is a terminal, rewritten in place; nothing elsewhere."""

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
    done: set[tuple[str, str]] = set()
    shown = sys.stderr.isatty()

    def tell(name: str, stage: str) -> None:
        if shown and stage != "done":
            number = 1 + sum(other == stage for _, other in done)
            done.add((name, stage))
            sys.stderr.write(f"\r\x1b[Kjaxmem: {stage} {name} ({number} of {count}) …")
            sys.stderr.flush()

    try:
        yield tell
    finally:
        if shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
