"""`DynamicLossScale`: when a loss scale grows and backs off."""

import dataclasses
import math
import numbers
from typing import Any

import numpy as np

from jaxmem._shown import Brief
from jaxmem._suggest import named_fields
from jaxmem.errors import ConfigError

DYNAMIC = "dynamic"


@named_fields()
@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicLossScale(Brief):
    """A loss scale that searches for the largest value without overflow; equal by value, hashable.

    The scale is constant within a window (one optimizer step). A window whose loss or gradients are not finite is
    skipped, and the scale is divided by `factor` once. After `growth_interval` finite windows it is multiplied by
    `factor`. It stays between `min` and `max`, so it never becomes infinite or 0, and always recovers.

    Args:
      initial: scale of the first window.
      growth_interval: number of finite windows before the scale grows.
      factor: by which the scale grows and backs off; a power of two scales gradients without rounding.
      min, max: bounds of the scale.

    Raises:
      ConfigError: a value cannot be honoured.

    >>> from jaxmem import Precision
    >>> Precision(compute="float16", loss_scale=DynamicLossScale(initial=1024)).loss_scale.initial
    1024.0

    Micikevicius et al., Mixed Precision Training, https://arxiv.org/abs/1710.03740, section 3.2.
    """

    initial: float = 2.0**15
    growth_interval: int = 2000
    factor: float = 2.0
    min: float = 1.0
    max: float = 2.0**24

    def __post_init__(self):
        for name in ("initial", "factor", "min", "max"):
            object.__setattr__(self, name, _positive(getattr(self, name), f"DynamicLossScale.{name}"))
        interval = self.growth_interval
        if isinstance(interval, bool) or not isinstance(interval, (int, np.integer)) or not 1 <= interval < 2**31:
            raise ConfigError(
                wanted="DynamicLossScale.growth_interval to be a whole number of at least 1",
                got=repr(interval),
                do="2000 is usual.",
            )
        object.__setattr__(self, "growth_interval", int(interval))
        if self.factor <= 1:
            raise ConfigError(
                wanted="DynamicLossScale.factor to be larger than 1",
                got=repr(self.factor),
                do="Use 2, or a number as loss_scale for a constant scale.",
            )
        if not self.min <= self.initial <= self.max:
            raise ConfigError(
                wanted="a DynamicLossScale with min <= initial <= max",
                got=f"min={self.min!r}, initial={self.initial!r}, max={self.max!r}",
                do="Change one of them.",
            )


LossScale = float | DynamicLossScale | None
"""A checked `Precision.loss_scale`: a number is a constant scale, None scales nothing."""


def as_loss_scale(value: Any, compute: str) -> LossScale:
    """The loss scale for a user's value; None becomes a dynamic scale if the compute dtype is float16.

    >>> as_loss_scale(None, "bfloat16"), as_loss_scale(8, "float16")
    (None, 8.0)
    >>> as_loss_scale(None, "float16") == as_loss_scale("dynamic", "float16") == DynamicLossScale()
    True
    """
    if value is None:
        return DynamicLossScale() if compute == "float16" else None
    if isinstance(value, DynamicLossScale):
        return value
    if isinstance(value, str) and value == DYNAMIC:
        return DynamicLossScale()
    return _positive(value, "precision.loss_scale", "None, 'dynamic', a DynamicLossScale or ")


def _positive(value: Any, field: str, others: str = "") -> float:
    """A positive number that float32 can represent, as a float; ConfigError otherwise."""
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        number = float(value)
        tiny, largest = (float(limit) for limit in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))
        if math.isfinite(number) and tiny <= number <= largest:
            return number
    raise ConfigError(
        wanted=f"{field} to be {others}a positive number that float32 can hold",
        got=repr(value),
        do="For example 2**15; leave it out for the compute dtype's default.",
    )
