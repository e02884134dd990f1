"""`aligned`: rows of text as columns."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]], right: int) -> str:
    """Columns two spaces apart, the first `right` of them set to the right.

    >>> print(aligned([["bytes", "name"], ["7", "x"]], right=1))
    bytes  name
        7  x
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = [
        [c.rjust(w) if i < right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True))]
        for line in lines
    ]
    return "\n".join("  ".join(row).rstrip() for row in rows)
