"""What was probably meant by a name that does not exist."""

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from jaxmem.errors import UnknownFieldError

Fields = TypeVar("Fields")


def meant(name: object, known: Iterable[str], *, aliases: Mapping[str, str] | None = None) -> str | None:
    """The known name that a wrong one stands for or is closest to; None where none is close.

    Args:
      name: what was written; anything but a text means nothing.
      known: the names that exist.
      aliases: other names in use, in lower case → known names.

    >>> meant("fulll", ["none", "full"]), meant("Full", ["none", "full"]), meant("x", ["none", "full"])
    ('full', 'full', None)
    >>> meant("bf16", ["float32", "bfloat16"], aliases={"bf16": "bfloat16"})
    'bfloat16'
    """
    if not isinstance(name, str):
        return None
    words = {each.lower(): each for each in known} | dict(aliases or {})
    written = name.strip().lower()
    close = [written] if written in words else difflib.get_close_matches(written, words, n=1)
    return words[close[0]] if close else None


def did_you_mean(name: object, known: Iterable[str], *, aliases: Mapping[str, str] | None = None) -> str:
    """`meant` as a question, with a space behind it; "" where nothing is close.

    >>> did_you_mean("fulll", ["none", "full"])
    'Did you mean full? '
    """
    found = meant(name, known, aliases=aliases)
    return f"Did you mean {found}? " if found else ""


def named_fields(aliases: Mapping[str, str] | None = None) -> Callable[[type[Fields]], type[Fields]]:
    """Decorates a keyword-only dataclass: it refuses what it has no field for, and says which one was probably meant.

    Args:
      aliases: as of `meant`.

    >>> @named_fields()
    ... @dataclasses.dataclass(kw_only=True)
    ... class Cake:
    ...     eggs: int = 2
    >>> Cake(egs=3)
    Traceback (most recent call last):
    jaxmem.errors.UnknownFieldError: Wanted fields of Cake: eggs; got 'egs'. Did you mean eggs?
    """

    def decorate(cls: type[Fields]) -> type[Fields]:
        init, known = cls.__init__, [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]

        @functools.wraps(init)
        def checked(self, *args, **fields):
            if args:
                raise UnknownFieldError(
                    wanted=f"fields of {cls.__name__} by their names: {', '.join(known)}",
                    got=", ".join(map(repr, args))[:200],
                    do=f"Write {cls.__name__}({known[0]}=...).",
                )
            unknown = sorted(set(fields) - set(known))
            if unknown:
                close = [near for name in unknown if (near := meant(name, known, aliases=aliases))]
                raise UnknownFieldError(
                    wanted=f"fields of {cls.__name__}: {', '.join(known)}",
                    got=", ".join(map(repr, unknown)),
                    do=f"Did you mean {' and '.join(close)}?" if close else "Remove or rename them.",
                )
            init(self, **fields)

        cls.__init__ = checked
        return cls

    return decorate
