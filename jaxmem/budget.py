"""`Budget`: bytes, or a share of the residual bytes of the plain function."""

import dataclasses
import math
import re

from jaxmem.errors import ConfigError

_UNITS = {"": 1, "b": 1}
_UNITS |= {f"{letter}ib": 1024**i for i, letter in enumerate("kmgt", 1)}
_UNITS |= {f"{letter}b": 1000**i for i, letter in enumerate("kmgt", 1)}
PREFIX = "auto:"
_BARE_BYTES = 2**10  # a smaller number without a unit is probably not meant as bytes


@dataclasses.dataclass(frozen=True)
class Budget:
    """How much may be saved for the backward pass: `bytes`, or a `share` of the plain function's residual bytes."""

    bytes: int | None = None
    share: float | None = None

    def __str__(self) -> str:
        """The budget in the largest exact unit, as `parse_budget` reads it.

        >>> str(parse_budget("1.1GiB")), str(parse_budget("1536MiB")), str(parse_budget("1000003B"))
        ('1.1GiB', '1536MiB', '1000003B')
        """
        if self.bytes is None:
            return repr(self.share)
        units = [(unit, size) for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if self.bytes >= size]
        for unit, size in units:
            if self.bytes % size == 0:
                return f"{self.bytes // size}{unit}"
        for unit, size in units:
            if int(round(self.bytes / size, 2) * size) == self.bytes:
                return f"{round(self.bytes / size, 2)}{unit}"
        return f"{self.bytes}B"


def is_auto(remat: str) -> bool:
    """Whether a remat setting names a budget, such as "auto:6GiB"."""
    return remat.startswith(PREFIX)


def parse_budget(budget: "int | float | str | Budget") -> Budget:
    """The budget that a user wrote.

    Args:
      budget: bytes as an int, "6GiB" or "500MB"; or a share below 1 as 0.25 or "0.25". May begin with "auto:".

    Raises:
      ConfigError: for any other value.

    >>> parse_budget("6GiB").bytes, parse_budget("auto:0.25").share
    (6442450944, 0.25)
    """
    if isinstance(budget, Budget):
        return budget
    text = str(budget).removeprefix(PREFIX).strip()
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)", text)
    if found and not isinstance(budget, bool) and found.group(2).lower() in _UNITS:
        number, unit = float(found.group(1)), found.group(2).lower()
        if unit or (isinstance(budget, int) and budget) or (number >= _BARE_BYTES and number == int(number)):
            size = number * _UNITS[unit]
            if math.isfinite(size):
                return Budget(bytes=int(size))
        elif 0 <= number < 1:
            return Budget(share=number)
    raise ConfigError(
        wanted="a remat budget: bytes with their unit, 6GiB or 500MB, or a share of the plain step's residuals below 1",
        got=repr(budget),
        do=f"Did you mean {text}iB?"
        if found and found.group(2).lower() in ("k", "m", "g", "t")
        else 'Write for example "auto:6GiB" or "auto:0.25".',
    )
