"""Sizes as XLA, the kernel and NumPy write them."""

import math
import re

SIZE = r"(-?\d{1,20}(?:\.\d{1,6})?) ?(bytes|[KMGTPE]i?B|[KMGTPEk]B?|B)?(?![A-Za-z])"
"""A number and its unit, as two groups."""

_POWERS = {"K": 1, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}
_SIZE = re.compile(SIZE)
_LARGEST = 2**63


def to_bytes(number: str, unit: str | None) -> int | None:
    """Bytes; every prefix is a power of 1024, as in all the programs read here. None where out of range.

    >>> to_bytes("15.75", "G") == to_bytes("15.75", "GiB") == 15.75 * 2**30
    True
    >>> to_bytes("4096", "kB"), to_bytes("12", None)
    (4194304, 12)
    """
    power = 0 if unit in (None, "", "B", "bytes") else _POWERS[unit[0]]
    value = float(number) * 1024**power
    if not math.isfinite(value) or not 0 <= value < _LARGEST:
        return None
    return int(number) if power == 0 and number.isascii() and number.isdigit() else round(value)


def parse_size(text: str) -> int | None:
    """The size that `text` starts with, blanks apart; None where there is none.

    >>> parse_size("  1.50GiB of memory")
    1610612736
    """
    match = _SIZE.match(text.lstrip())
    return to_bytes(match[1], match[2]) if match else None
