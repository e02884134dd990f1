"""What long work is at, on stderr: a spinner on a terminal, else a line for each stage that takes long."""

import contextlib
import logging
import sys
import threading
from collections.abc import Callable, Iterator

_PATIENCE_SECONDS = 20.0


@contextlib.contextmanager
def stages(first: str) -> Iterator[Callable[[str], None]]:
    """Shows `first`, then what the function it gives is called with, and what jaxmem logs meanwhile.

    >>> with stages("tracing") as stage:  # no terminal here, and quickly over, so nothing is shown
    ...     stage("compiling")
    """
    with _spinner(first) if sys.stderr.isatty() else _lines(first) as show:
        handler = _Handler(show)
        logger = logging.getLogger("jaxmem")
        level = logger.level
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        try:
            yield show
        finally:
            logger.removeHandler(handler)
            logger.setLevel(level)


@contextlib.contextmanager
def _spinner(first: str) -> Iterator[Callable[[str], None]]:
    from rich.console import Console

    with Console(stderr=True).status(first) as status:
        yield status.update


@contextlib.contextmanager
def _lines(first: str) -> Iterator[Callable[[str], None]]:
    timer = threading.Timer(0, lambda: None)

    def show(stage: str) -> None:
        nonlocal timer
        timer.cancel()
        timer = threading.Timer(_PATIENCE_SECONDS, lambda: print(f"jaxmem: {stage} …", file=sys.stderr, flush=True))
        timer.daemon = True
        timer.start()

    show(first)
    try:
        yield show
    finally:
        timer.cancel()


class _Handler(logging.Handler):
    def __init__(self, show: Callable[[str], None]):
        super().__init__(logging.INFO)
        self._show = show

    def emit(self, record: logging.LogRecord) -> None:
        self._show(record.getMessage())
