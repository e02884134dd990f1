"""What long work is at: a line with its seconds on a terminal's stderr, a line below a notebook's cell, else a line for
each stage that is long.
"""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence

from jaxmem._cell import in_notebook

_PATIENCE_SECONDS = 20.0
Show = Callable[[str], None]


@contextlib.contextmanager
def stages(first: str, *, elsewhere: bool = True) -> Iterator[Show]:
    """Shows `first`, then what the function it gives is called with, and beside it what jaxmem logs meanwhile.

    On a terminal the line tells the seconds of its stage; there and in a notebook it is gone in the end.

    Args:
      first: the first stage.
      elsewhere: whether to print a line a stage that is long where there is neither a terminal nor a notebook.

    >>> with stages("tracing") as stage:  # no terminal here, and quickly over, so nothing is shown
    ...     stage("compiling")
    """
    if sys.stderr.isatty():
        shown = _line(first)
    elif in_notebook():
        shown = _cell_line(first)
    else:
        shown = _lines(first) if elsewhere else contextlib.nullcontext(lambda stage: None)
    with shown as show, _logged(show, first) as stage:
        yield stage


def counted(names: Sequence[str], show: Show, *, of: str = "", before: int = 0, total: int = 0):
    """A `progress(name, stage)` for comparisons, which shows "3 of 6, compiling full for gpu-h100".

    Args:
      names: of the variants, in order.
      show: shows a stage.
      of: what follows the name, such as " for gpu-h100".
      before: how many variants came before these.
      total: of all variants; these if not given.

    >>> tell = counted(["none", "full"], print, of=" for cpu", before=2, total=4)
    >>> tell("full", "compiling"), tell("full", "done")
    4 of 4, compiling full for cpu
    (None, None)
    """

    def tell(name: str, stage: str) -> None:
        if stage == "done":
            return
        at = f"{before + names.index(name) + 1} of {total or len(names)}, " if name in names else ""  # one more
        show(f"{at}{stage} {name}{of}")

    return tell


@contextlib.contextmanager
def _line(first: str) -> Iterator[Show]:
    # rich costs 50 ms to import, and without a terminal none of it is needed.
    from rich.console import Console
    from rich.live import Live
    from rich.spinner import Spinner
    from rich.text import Text

    console, spinner = Console(stderr=True), Spinner("dots")
    said, since = first, time.monotonic()

    def draw():
        text, seconds = spinner.render(time.monotonic()), f", {time.monotonic() - since:.0f} s"
        assert isinstance(text, Text)
        stage = Text(said)
        stage.truncate(max(1, console.width - text.cell_len - len(seconds) - 2), overflow="ellipsis")
        return text.append(" ").append_text(stage).append(seconds)

    def show(stage: str) -> None:
        nonlocal said, since
        said, since = stage, time.monotonic()

    # A piped stdout must not end up on the terminal.
    options = {"transient": True, "refresh_per_second": 8, "redirect_stdout": sys.stdout.isatty()}
    with Live(console=console, get_renderable=draw, **options):
        yield show


@contextlib.contextmanager
def _cell_line(first: str) -> Iterator[Show]:
    from IPython.display import DisplayHandle  # where this is called, a notebook has loaded it

    def text(said: str) -> dict[str, str]:
        return {"text/plain": said}

    line = DisplayHandle()
    line.display(text(f"jaxmem: {first} …"), raw=True)
    try:
        yield lambda stage: line.update(text(f"jaxmem: {stage} …"), raw=True)
    finally:
        line.update(text(""), raw=True)


@contextlib.contextmanager
def _lines(first: str) -> Iterator[Show]:
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


@contextlib.contextmanager
def _logged(show: Show, first: str) -> Iterator[Show]:
    """`show`, with what jaxmem logs behind the stage that it belongs to.

    Handlers of others, such as absl's, which grain sets up, get no more than without.
    """
    logger = logging.getLogger("jaxmem")
    level, propagate, wanted = logger.level, logger.propagate, logger.getEffectiveLevel()
    handler = _Handler(show, first, others=wanted if propagate else logging.CRITICAL + 1)
    logger.addHandler(handler)
    logger.setLevel(min(logging.INFO, wanted))
    logger.propagate = False
    try:
        yield handler.stage
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagate


class _Handler(logging.Handler):
    def __init__(self, show: Show, first: str, *, others: int):
        super().__init__(logging.NOTSET)
        self._show, self._stage, self._others = show, first, others

    def stage(self, stage: str) -> None:
        self._stage = stage
        self._show(stage)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.INFO:
            self._show(f"{self._stage}: {record.getMessage()}")
        if record.levelno >= self._others:
            logging.getLogger().handle(record)
