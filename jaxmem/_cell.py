"""What a notebook shows of an error: the user's own lines and what it says. `%xmode Verbose` shows all frames."""

import contextlib
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from jaxmem._source import is_own, is_users

_MOST = 4  # of the user's lines: the one in the cell, and the innermost


def render(error: BaseException) -> list[str]:
    """Lines for IPython, which asks an exception for them by `_render_traceback_`.

    >>> print("\\n".join(render(ValueError("Wanted a; got b."))))
    ValueError: Wanted a; got b.
    """
    shell = ipython_shell()
    if shell is not None and getattr(shell.InteractiveTB, "mode", "") == "Verbose":
        return shell.InteractiveTB.structured_traceback(type(error), error, error.__traceback__)
    lines = []
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    for frame in frames[:1] + frames[1:][1 - _MOST :]:
        inside = "" if frame.name == "<module>" else f", in {frame.name}"
        lines += [f"{_place(shell, frame.filename)}, line {frame.lineno}{inside}", f"----> {frame.line}", ""]
    lines.append(f"{type(error).__name__}: {error}".removesuffix(": "))
    return lines if error.__cause__ is None else [*lines, "(%xmode Verbose, then %tb, shows all frames.)"]


def shorten(error: BaseException) -> None:
    """Has IPython show an error of another library as `render` does, too. Elsewhere, nothing changes."""
    if ipython_shell() is not None and not hasattr(error, "_render_traceback_"):
        with contextlib.suppress(AttributeError):  # an exception with slots
            error._render_traceback_ = _render_last  # pyright: ignore[reportAttributeAccessIssue]


@contextlib.contextmanager
def shortening(*, all: bool = False) -> Iterator[None]:
    """A context, or a decorator, in which code of the user's is called: its errors are shown without frames between.

    So is Ctrl-C, wherever it comes.

    Args:
      all: whether JAX does nothing else within, so that what it raises is due to the user's code, too.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if all or isinstance(error, KeyboardInterrupt) or _is_raised_in_users_code(error):
            shorten(error)
        raise


def _is_raised_in_users_code(error: BaseException) -> bool:
    """Whether code of the user's that jaxmem called raised the error, and neither jaxmem nor its caller."""
    paths = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    innermost = next((path for path in reversed(paths) if is_users(path) or is_own(path)), "")
    return is_users(innermost) and any(map(is_own, paths))


def _render_last() -> list[str]:
    # Bound to no exception: that would be a cycle, which keeps the arrays of all frames alive.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    return [] if error is None else render(error)


def _place(shell: Any, path: str) -> str:
    """A cell by its number, any other file by its name."""
    named = getattr(getattr(shell, "compile", None), "format_code_name", lambda path: None)(path)
    return " ".join(named) if named else os.path.basename(path)


def ipython_shell() -> Any:
    """IPython's shell, where this runs in one."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


def in_notebook() -> bool:
    """Whether this Python is the kernel of a notebook: Jupyter's, VS Code's or Colab's."""
    return getattr(ipython_shell(), "kernel", None) is not None
