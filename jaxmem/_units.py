"""Bytes, FLOPs and seconds as text for people, and sizes in the texts of compilers, allocators and the kernel."""

import math
import re

SIZE = r"(-?\d{1,20}(?:\.\d{1,6})?) ?(bytes|[KMGTPE]i?B|[KMGTPEk]B?|B)?(?![A-Za-z])"
"""Pattern of a number and its unit, in two groups."""

_POWERS = {"K": 1, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}


def size_in(match: re.Match, group: int = 1) -> int | None:
    """Bytes of a matched `SIZE`; None if out of range. Every prefix is a power of 1024, as in all programs read here.

    >>> [size_in(re.match(SIZE, text)) for text in ("15.75G", "15.75GiB of memory", "4096kB", "12", "-2.5G")]
    [16911433728, 16911433728, 4194304, 12, None]
    """
    number, unit = match[group], match[group + 1]
    power = 0 if unit in (None, "B", "bytes") else _POWERS[unit[0]]
    value = float(number) * 1024**power
    if not math.isfinite(value) or not 0 <= value < 2**63:
        return None
    return int(number) if power == 0 and number.isascii() and number.isdigit() else round(value)


def format_bytes(value: int | None) -> str:
    """Bytes in KiB, MiB or GiB; a dash for None.

    >>> format_bytes(3 * 2**20), format_bytes(None)
    ('3.0 MiB', '-')
    """
    if value is None:
        return "-"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}" if unit == "GiB" else f"{value / size:.1f} {unit}"
    return f"{value} B"


def format_apart(*values: int) -> list[str]:
    """Each value by `format_bytes`; in plain bytes if different values would read alike.

    >>> format_apart(15360, 22835), format_apart(15360, 15361)
    (['15.0 KiB', '22.3 KiB'], ['15,360 bytes', '15,361 bytes'])
    """
    texts = [format_bytes(value) for value in values]
    return texts if len(set(texts)) == len(set(values)) else [f"{value:,} bytes" for value in values]


def format_share(part: int | None, whole: int | None) -> str:
    """A part of a whole in percent; empty where one of them is unknown.

    >>> format_share(1, 3), format_share(1, 1000), format_share(0, 3), format_share(None, 3)
    ('33%', '<1%', '0%', '')
    """
    if not whole or part is None:
        return ""
    share = part / whole
    return "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def format_flops(value: int | None) -> str:
    """FLOPs in K, M, G, T or P; a dash for None.

    >>> format_flops(2_500_000_000)
    '2.50 GFLOP'
    """
    if value is None:
        return "-"
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("K", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}FLOP"
    return f"{value} FLOP"


def format_seconds(value: float | None) -> str:
    """Seconds in µs, ms or s; a dash for None.

    >>> format_seconds(0.2056), format_seconds(None)
    ('205.6 ms', '-')
    """
    if value is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e-6:.4g} µs"
