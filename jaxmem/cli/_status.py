"""A spinner on stderr that names the stage of long work; silent where stderr is not a terminal."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stages(first: str) -> Iterator[Callable[[str], None]]:
    """Shows `first`, and then what the function it gives is called with.

    >>> with stages("tracing") as stage:  # no terminal here, so nothing is shown
    ...     stage("compiling")
    """
    if not sys.stderr.isatty():
        yield lambda stage: None
        return
    from rich.console import Console

    with Console(stderr=True).status(first) as status:
        yield lambda stage: status.update(stage)
