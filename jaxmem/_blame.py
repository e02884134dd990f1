"""Whose fault an exception is: jaxmem's own, or that of what it was given to trace and compile."""

import contextlib
import os
import traceback
from collections.abc import Iterator

from jaxmem._source import is_own, is_python, is_users, package_of
from jaxmem.errors import BudgetInfeasible, DoesNotFitError, JaxmemError

_TOOLS = ("numpy", "scipy")  # what fails by the arguments it is given: whoever called it is to blame
LONGEST_MESSAGE = 1200  # characters; a compiler's error may run to tens of thousands


def is_own_fault(error: BaseException) -> bool:
    """Whether jaxmem itself failed, rather than JAX, a compiler or the user's code in its hands.

    Sees through JAX's filter of tracebacks only where that was off: see `whole_tracebacks`.

    >>> from jaxmem.errors import InputError
    >>> is_own_fault(InputError(wanted="a", got="b", do="c"))
    False
    """
    if isinstance(error, JaxmemError):
        return False
    path = _raised_in(error)
    return not path or is_own(path)


def is_jax_refusal(error: BaseException) -> bool:
    """Whether JAX, or a compiler that it called, raised it; told as by `is_own_fault`."""
    return package_of(_raised_in(error)) in ("jax", "jaxlib")


def users_frame(error: BaseException) -> traceback.FrameSummary | None:
    """The innermost frame in code that belongs neither to jaxmem, an installed package, nor Python."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users(frame.filename)]
    return frames[-1] if frames else None


def _raised_in(error: BaseException) -> str:
    """The file of the innermost frame that is not of a mere tool; "" where there is none."""
    frames = reversed([frame for frame, _ in traceback.walk_tb(error.__traceback__)])
    return next((path for frame in frames if not _is_tool(path := frame.f_code.co_filename)), "")


def _is_tool(path: str) -> bool:
    package = package_of(path)
    return package in _TOOLS or path.startswith("<frozen ") or (not package and is_python(path))


@contextlib.contextmanager
def whole_tracebacks() -> Iterator[None]:
    """Tracebacks keep JAX's own frames meanwhile: without them, what JAX raises seems to come from its caller."""
    from jaxmem import _compat  # imports JAX: the command line, which asks whose fault an error is, sets its own first

    with _compat.whole_tracebacks():
        yield


def reason(error: BaseException) -> str:
    """Why something cannot be had, as one paragraph of bounded length.

    >>> reason(TypeError("complex64 is not accepted"))
    'refused. TypeError: complex64 is not accepted'
    """
    text = paragraph(str(error)) if isinstance(error, JaxmemError) else named(error)
    return f"{'does not fit' if isinstance(error, (BudgetInfeasible, DoesNotFitError)) else 'refused'}. {text}"


def named(error: BaseException, longest: int = LONGEST_MESSAGE) -> str:
    """An error's class and what it says, on one line.

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
