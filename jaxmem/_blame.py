"""Whose fault an exception is: jaxmem's, the user's code's, or JAX's; and how it is told in one paragraph."""

import contextlib
import os
import sys
import traceback
import warnings
from collections.abc import Iterator

from jaxmem._cell import shorten
from jaxmem._source import is_own, is_python, is_users, package_of
from jaxmem.errors import BudgetInfeasible, DoesNotFitError, JaxmemError

_TOOLS = ("numpy", "scipy")  # their errors are the fault of the caller, who chose the arguments
LONGEST_MESSAGE = 1200  # characters; a compiler's error may run to tens of thousands


def is_own_fault(error: BaseException) -> bool:
    """Whether jaxmem itself failed, and not JAX, a compiler or the user's code.

    Reliable only within `whole_tracebacks`, which turns JAX's filter of tracebacks off.

    >>> from jaxmem.errors import InputError
    >>> is_own_fault(InputError(wanted="a", got="b", do="c"))
    False
    """
    if isinstance(error, JaxmemError):
        return False
    path = _raised_in(error)
    return not path or is_own(path)


def is_jax_refusal(error: BaseException) -> bool:
    """Whether JAX, or a compiler that it called, raised the error; reliable as `is_own_fault` is."""
    return package_of(_raised_in(error)) in ("jax", "jaxlib")


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame in the user's code: not of jaxmem, an installed package or Python; None without one."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return frames[-1] if frames else None


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the line of the user's that is under way, whatever calls lie between; without one, at the caller."""
    frame = sys._getframe(1)
    caller = frame
    while frame is not None and not is_users(frame.f_code.co_filename):
        frame = frame.f_back
    frame = frame or caller
    warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, frame.f_globals.get("__name__"))


def _raised_in(error: BaseException) -> str:
    """The file of the innermost frame that is not in Python or a tool such as numpy; "" without one."""
    frames = reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
    return next((path for frame in frames if not _is_tool(path := frame.f_code.co_filename)), "")


def _is_tool(path: str) -> bool:
    package = package_of(path)
    return package in _TOOLS or path.startswith("<frozen ") or (not package and is_python(path))


@contextlib.contextmanager
def whole_tracebacks() -> Iterator[None]:
    """A context in which tracebacks keep JAX's frames: without them, JAX's errors seem to come from its caller.

    What leaves it and is not jaxmem's fault, a notebook shows without these frames.
    """
    from jaxmem import _compat  # imports JAX, whose environment the command line sets after it imports this module

    with _compat.whole_tracebacks():
        try:
            yield
        except Exception as error:
            if not is_own_fault(error):
                shorten(error)
            raise


def reason(error: BaseException) -> str:
    """Why a variant was refused or does not fit, as one paragraph of bounded length.

    >>> reason(TypeError("complex64 is not accepted"))
    'refused. TypeError: complex64 is not accepted'
    """
    text = paragraph(str(error)) if isinstance(error, JaxmemError) else named(error)
    return f"{'does not fit' if isinstance(error, (BudgetInfeasible, DoesNotFitError)) else 'refused'}. {text}"


@contextlib.contextmanager
def noting_refusal(refused: list[tuple[str, str]], name: str) -> Iterator[None]:
    """A context that adds (name, reason) to `refused` where a variant is refused; a fault of jaxmem's is raised."""
    try:
        with whole_tracebacks():
            yield
    except Exception as error:
        if is_own_fault(error):
            raise
        refused.append((name, reason(error)))


def named(error: BaseException, longest: int = LONGEST_MESSAGE) -> str:
    """An error's class and message, on one line.

    >>> named(KeyError("x")), named(ValueError())
    ("KeyError: 'x'", 'ValueError')
    """
    message = paragraph(str(error), longest)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def paragraph(text: str, longest: int = LONGEST_MESSAGE) -> str:
    """`text` on one line, cut to a number of characters."""
    line = " ".join(text.split())
    return line if len(line) <= longest else f"{line[:longest]}…"


def where_raised(error: BaseException) -> str:
    """What an error says, and where in the user's code it was raised, if it was."""
    frame = users_frame(error)
    where = f" ({os.path.basename(frame.filename)}, line {frame.lineno})" if frame else ""
    return f"{named(error, 400).rstrip('.')}{where}"
