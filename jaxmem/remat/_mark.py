"""`marked`: a block that is marked in a program, and not recomputed."""

from typing import Any

from jaxmem.policy import Policy
from jaxmem.remat._wrap import CALL, Options, wrap


class _Mark:
    """The policy of a checkpoint that only says where a block is."""

    def __call__(self, prim, *avals, **params) -> bool:
        return True

    def __eq__(self, other):
        return isinstance(other, _Mark)

    def __hash__(self):
        return hash(_Mark)


MARK = _Mark()


def marked(target: Any, policy: str | Policy, *, static_argnames=(), methods=CALL, scanned: bool = False) -> Any:
    """`target` as a block for `remat.blocks.tied`, which takes the mark away again; takes what `checkpoint` takes."""
    return wrap(target, Options(MARK, not scanned), static_argnames, methods)
