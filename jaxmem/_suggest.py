"""What was probably meant by a name that does not exist."""

import difflib
from collections.abc import Iterable, Mapping


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
