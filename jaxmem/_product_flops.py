"""Floating-point operations of matrix products and convolutions, from shapes alone.

Two operations (multiply, add) are counted for each term of a sum. Terms that a convolution multiplies
with padding, or with the zeros of a dilated input, are not counted: so a strided convolution and its
gradients cost the same, as they do in the compiler's own count.
"""

import math
from collections.abc import Sequence


def dot_flops(output_shape: Sequence[int], lhs_shape: Sequence[int], lhs_contracting: Sequence[int]) -> int:
    """FLOPs of a (batched) matrix product.

    >>> dot_flops((8, 32), (8, 16), (1,))
    8192
    """
    return 2 * math.prod(output_shape) * math.prod(lhs_shape[d] for d in lhs_contracting)


def convolution_flops(
    *,
    batch: int,
    kernel_input_features: int,
    output_features: int,
    window: Sequence["WindowDimension"],
    batch_groups: int = 1,
) -> int:
    """FLOPs of a convolution.

    Args:
      batch: size of the input's batch dimension.
      kernel_input_features: the kernel's input-feature dimension (input features per feature group).
      output_features: size of the output's feature dimension.
      window: one `WindowDimension` for each spatial dimension.
      batch_groups: XLA's batch_group_count.

    >>> same = WindowDimension(input=4, kernel=3, output=4, pad=1)
    >>> convolution_flops(batch=1, kernel_input_features=1, output_features=1, window=[same])
    20
    """
    terms = math.prod(d.terms() for d in window)
    return 2 * (batch // batch_groups) * kernel_input_features * output_features * terms


class WindowDimension:
    """One spatial dimension of a convolution; sizes in elements, `pad` is the padding below."""

    __slots__ = ("input", "kernel", "kernel_dilation", "lhs_dilation", "output", "pad", "stride")

    def __init__(self, *, input: int, kernel: int, output: int, stride=1, pad=0, lhs_dilation=1, kernel_dilation=1):
        self.input, self.kernel, self.output = input, kernel, output
        self.stride, self.pad = stride, pad
        self.lhs_dilation, self.kernel_dilation = lhs_dilation, kernel_dilation

    def terms(self) -> int:
        """How many pairs (output position, kernel position) meet a real input element."""
        last = (self.input - 1) * self.lhs_dilation
        count = 0
        for k in range(self.kernel):
            # Output o reads the dilated input at o * stride + shift.
            shift = k * self.kernel_dilation - self.pad
            low = max(0, -(shift // self.stride))  # ceil(-shift / stride)
            high = min(self.output - 1, (last - shift) // self.stride)
            count += _multiples(low, high, self.stride, shift, self.lhs_dilation)
        return count


def _multiples(low: int, high: int, stride: int, shift: int, dilation: int) -> int:
    """How many o in [low, high] make o * stride + shift a multiple of dilation."""
    if high < low:
        return 0
    common = math.gcd(stride, dilation)
    if shift % common:
        return 0
    period = dilation // common
    if period == 1:
        return high - low + 1
    first = (-shift // common) * pow(stride // common, -1, period) % period
    first += -(-(low - first) // period) * period  # the first such o at or above low
    return 0 if first > high else (high - first) // period + 1
