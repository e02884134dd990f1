"""The names of blocks, all made here.

encoder/Block_0          a module, by the scopes that its equations share
encoder/layers[2/12]     the second of twelve alike stretches of equations; `loss[2/12]` outside of scopes
encoder/scan             the body of a scan
encoder/Block_0#2        the second block of that name
encoder/Block_0.1        the first of several towers of a block
stem, before X, head     what lies before the first block, before the block X, and after the last block
whole                    all of a function in which nothing repeats
"""

import itertools
from collections.abc import Sequence

STEM, HEAD, WHOLE = "stem", "head", "whole"


def scopes_name(paths: Sequence[tuple[str, ...]]) -> str:
    """The scopes that equations share; `paths` are the scopes of each, outermost first.

    >>> scopes_name([("encoder", "Block_0", "Dense_0"), ("encoder", "Block_0")])
    'encoder/Block_0'
    """
    first, last = min(paths), max(paths)
    shared = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "/".join(scope for scope, _ in shared)


def stretch_name(scopes: str, index: int, count: int) -> str:
    return f"{scopes or 'loss'}[{index + 1}/{count}]"


def scan_name(path: tuple[str, ...]) -> str:
    return "/".join((*path, "scan"))


def numbered_name(name: str, number: int) -> str:
    return name if number == 1 else f"{name}#{number}"


def part_names(name: str, count: int) -> list[str]:
    return [name] if count == 1 else [f"{name}.{i + 1}" for i in range(count)]


def before_name(name: str) -> str:
    return f"before {name}"


def equation_name(kind: str, index: int) -> str:
    """For what has only a place: `equation 7`, `checkpoint 7`."""
    return f"{kind} {index}"
