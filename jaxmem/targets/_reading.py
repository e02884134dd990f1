"""Reads parts of a compiled program back, which not every pair of JAX and compiler can."""

from collections.abc import Callable
from typing import TypeVar

Part = TypeVar("Part")


def read_back(read: Callable[[], Part]) -> tuple[Part | None, str]:
    """What `read` returns and "", or None and why it cannot be read.

    A backend may keep a part to itself, and a compiler newer than jaxlib may write instructions that jaxlib does not
    know; each raises errors of its own.

    Args:
      read: such as `lambda: compiled.as_text()`; nothing of the program is touched before it is called.

    >>> read_back(lambda: "HloModule jit_f"), read_back(lambda: 1 // 0)
    (('HloModule jit_f', ''), (None, 'integer division or modulo by zero'))
    """
    try:
        return read(), ""
    except Exception as error:
        return None, " ".join(str(error).split())[:200].rstrip(".") or type(error).__name__
