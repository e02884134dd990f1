"""`Settled`: how a step is formed where its config leaves that open, settled for one target."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settled:
    """Settings of a step's form, none of them "auto".

    Args:
      order: "tied", each layer's weight gradients are made before the backward pass goes on; "head", those of what
        comes after the last layer are; or "free".
      roll: whether repeated unrolled layers run as one scan.
      random: "fenced", masks are drawn once and fused into nothing, or "free".

    >>> Settled.read({"order": "tied"})
    Settled(order='tied', roll=False, random='free')
    """

    order: str = "free"
    roll: bool = False
    random: str = "free"

    @classmethod
    def read(cls, fields: dict[str, Any]) -> "Settled":
        """From what `dataclasses.asdict` made; what is missing is the plain form."""
        return cls(**fields)


AS_WRITTEN = Settled()
"""The form in which the user's loss is written."""
