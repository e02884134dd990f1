"""What the arguments of a program hold, by their paths."""

import inspect
from collections.abc import Callable, Mapping, Sequence

from jaxmem.analysis._records import KINDS
from jaxmem.errors import InputError


def kinds_by_path(
    kinds: Mapping[str, str] | Sequence[str] | None, fn: Callable | None = None
) -> Callable[[str], str] | None:
    """A function from an argument's path to its kind: that of the longest given path which begins it.

    Args:
      kinds: by path, or one for each positional argument of `fn`.
      fn: names the positional arguments.

    Raises:
      InputError: a kind that is none of `KINDS`, or something that is no mapping.

    >>> kind_of = kinds_by_path({"state": "state", "state.params": "parameters"})
    >>> kind_of("state.params['w']"), kind_of("state.step"), kind_of("x")
    ('parameters', 'state', 'arguments')
    """
    if kinds is None:
        return None
    if isinstance(kinds, (tuple, list)) and fn is not None:
        kinds = dict(zip(_argument_names(fn, len(kinds)), kinds, strict=True))
    if not isinstance(kinds, Mapping) or not all(kind in KINDS for kind in kinds.values()):
        raise InputError(
            wanted=f"arg_kinds={{path: kind}} with kinds of {', '.join(KINDS)}",
            got=repr(kinds),
            do='For example arg_kinds={"params": "parameters"}, or one kind for each argument.',
        )
    paths = sorted(kinds, key=len, reverse=True)

    def kind_of(path: str) -> str:
        return next(
            (kinds[p] for p in paths if path.startswith(p) and path[len(p) : len(p) + 1] in ("", ".", "[")), "arguments"
        )

    return kind_of


def _argument_names(fn: Callable, count: int) -> list[str]:
    """The roots of the paths that JAX gives to positional arguments."""
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        parameters = []
    names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)][:count]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "args")
    return names + [f"{rest}[{number}]" for number in range(count - len(names))]
