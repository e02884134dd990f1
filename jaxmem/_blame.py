"""Whose fault an exception is: jaxmem's own, or that of what it was given to trace and compile."""

import contextlib
import os
import sysconfig
import traceback
from collections.abc import Iterator

import jax

from jaxmem._source import is_own
from jaxmem.errors import JaxmemError

# What fails by the arguments it is given: whoever called it is to blame.
_TOOLS = tuple(f"{os.sep}{name}{os.sep}" for name in ("numpy", "scipy"))
_LONGEST = 1200  # characters; a compiler's error may run to tens of thousands


def is_own_fault(error: BaseException) -> bool:
    """Whether jaxmem itself failed, rather than JAX, a compiler or the user's code in its hands.

    Sees through JAX's filter of tracebacks only where that was off: see `whole_tracebacks`.

    >>> from jaxmem.errors import InputError
    >>> is_own_fault(InputError(wanted="a", got="b", do="c"))
    False
    """
    if isinstance(error, JaxmemError):
        return False
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        path = frame.f_code.co_filename
        if is_own(path):
            return True
        if not _is_tool(path):
            return False
    return True


def _is_tool(path: str) -> bool:
    stdlib = sysconfig.get_path("stdlib") + os.sep
    in_stdlib = path.startswith(stdlib) and "site-packages" not in path
    return in_stdlib or path.startswith("<frozen ") or any(name in path for name in _TOOLS)


@contextlib.contextmanager
def whole_tracebacks() -> Iterator[None]:
    """Tracebacks keep JAX's own frames meanwhile: without them, what JAX raises seems to come from its caller."""
    before = jax.config.jax_traceback_filtering
    jax.config.update("jax_traceback_filtering", "off")
    try:
        yield
    finally:
        jax.config.update("jax_traceback_filtering", before)


def reason(error: BaseException) -> str:
    """What an exception says, as one paragraph of bounded length; with its class where that is not jaxmem's.

    >>> reason(TypeError("complex64 is not accepted"))
    'TypeError: complex64 is not accepted'
    """
    text = " ".join(str(error).split())
    if not isinstance(error, JaxmemError):
        text = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
