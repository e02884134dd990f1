"""jaxmem's own warnings as paragraphs on stderr, without the file and line that Python shows."""

import contextlib
import sys
import warnings
from collections.abc import Iterator

from jaxmem._blame import paragraph
from jaxmem.errors import CheckpointWarning, MemoryWarning, RematWarning, SettingWarning


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Shows each of jaxmem's warnings once, as the errors are shown; others as ever.

    >>> import contextlib, sys
    >>> with contextlib.redirect_stderr(sys.stdout), plain_warnings():
    ...     warnings.warn("Two blocks save nothing.", RematWarning)
    jaxmem: warning: Two blocks save nothing.
    """
    own = (CheckpointWarning, MemoryWarning, RematWarning, SettingWarning)
    with warnings.catch_warnings():
        as_ever, seen = warnings.showwarning, set()

        def show(message, category, filename, lineno, file=None, line=None):
            if not issubclass(category, own):
                as_ever(message, category, filename, lineno, file, line)
            elif str(message) not in seen:
                seen.add(str(message))
                print(f"jaxmem: warning: {paragraph(str(message))}", file=file or sys.stderr)

        warnings.showwarning = show
        for category in own:
            warnings.simplefilter("always", category)
        yield
