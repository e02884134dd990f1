"""The settings of levers and their words. `Settled`: a step's form where its config leaves it open, on one target."""

import dataclasses
from typing import Any

_COMPILE = 'Leave it at "auto", or compare the others by compiles.'
SETTINGS: dict[str, tuple[tuple[Any, ...], str]] = {
    "gradient_reduction": (("auto", "once", "each"), 'Use "auto" unless batches are sharded.'),
    "order": (("auto", "tied", "free"), _COMPILE),
    "roll": (("auto", True, False), _COMPILE),
    "random": (("auto", "fenced", "free"), _COMPILE),
    "generator": (("given", "rbg", "threefry2x32"), 'Use "given" for the key\'s own.'),
}
"""By field of `MemoryConfig`, of those with a few settings: these, and what to do about any other."""
WORDS: dict[str, dict[Any, str]] = {
    "order": {"auto": "order auto", "tied": "tied", "head": "head tied", "free": "free"},
    "roll": {"auto": "roll auto", True: "rolled", False: "unrolled"},
    "random": {"auto": "random auto", "fenced": "fenced", "free": "unfenced"},
    "gathers": {"narrow": "narrow gathers", "as written": "gathers as written"},
    "generator": {"given": "own generator", "rbg": "rbg", "threefry2x32": "threefry2x32"},
}
"""By field of `MemoryConfig` or `Settled`: the word for each setting and form, in which no two fields are alike."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settled:
    """Settings of a step's form, none of them "auto".

    Args:
      order: "tied", each layer's weight gradients are made before the backward pass goes on; "head", those of what
        comes after the last layer are; or "free".
      roll: whether repeated unrolled layers run as one scan.
      random: "fenced", masks are drawn once and fused into nothing, or "free".
      gathers: "narrow", gathers of a value that was just widened read the narrow one; or "as written". The target
        alone says it, no field of a config.

    >>> Settled.read({"order": "tied"})
    Settled(order='tied', roll=False, random='free', gathers='as written')
    """

    order: str = "free"
    roll: bool = False
    random: str = "free"
    gathers: str = "as written"

    @classmethod
    def read(cls, fields: dict[str, Any]) -> "Settled":
        """From what `dataclasses.asdict` made; what is missing is the plain form."""
        return cls(**fields)

    def unlike(self, other: "Settled") -> dict[str, Any]:
        """The fields in which this form is another.

        >>> Settled(roll=True).unlike(Settled(order="tied"))
        {'order': 'free', 'roll': True}
        """
        return {name: value for name, value in dataclasses.asdict(self).items() if value != getattr(other, name)}

    def in_words(self, other: "Settled") -> str:
        """`unlike` in words.

        >>> Settled(roll=True, random="fenced").in_words(Settled())
        'rolled, fenced'
        """
        return ", ".join(WORDS[name][value] for name, value in self.unlike(other).items())


AS_WRITTEN = Settled()
"""The form in which the user's loss is written."""
