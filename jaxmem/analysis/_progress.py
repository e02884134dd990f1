"""What a comparison is at: a line on stderr where that is a terminal; nothing elsewhere."""

import contextlib
from collections.abc import Callable, Iterator, Sequence

from jaxmem._status import counted, stages

Progress = Callable[[str, str], None]


@contextlib.contextmanager
def on_terminal(names: Sequence[str]) -> Iterator[Progress]:
    """A `progress` for `compare`.

    Args:
      names: of the variants.

    >>> with on_terminal(["none", "full"]) as tell:  # no terminal here
    ...     tell("full", "compiling")
    """
    with stages("tracing", elsewhere=False) as show:
        yield counted(names, show)
