"""Bytes and FLOPs as people read them; used in messages and by the renderers."""


def format_bytes(value: int | None) -> str:
    """Bytes in KiB, MiB or GiB; a dash where unknown.

    >>> format_bytes(3 * 2**20), format_bytes(None)
    ('3.0 MiB', '-')
    """
    if value is None:
        return "-"
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}" if unit == "GiB" else f"{value / size:.1f} {unit}"
    return f"{value} B"


def format_flops(value: int | None) -> str:
    """FLOPs in K, M, G, T or P; a dash where unknown.

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
    """Seconds in µs, ms or s; a dash where unknown.

    >>> format_seconds(0.2056), format_seconds(None)
    ('205.6 ms', '-')
    """
    if value is None:
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e-6:.4g} µs"
