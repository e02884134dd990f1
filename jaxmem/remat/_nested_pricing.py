"""How `nested_scan` cuts a scan into segments, and what that keeps and recomputes: arithmetic, no arrays."""

import dataclasses
from typing import Literal

import numpy as np

from jaxmem._shown import Brief
from jaxmem.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class NestedScanBytes(Brief):
    """What the backward pass of one `nested_scan` holds and does, per device.

    Args:
      length: N, the steps of the scan.
      segments: the lengths of nested segments, outermost first, 1 last where a step keeps nothing but its start.
      kept_carries: carries alive at once at most: N/k + k with segments of k steps.
      kept_bytes: their bytes, and those of what the policy keeps of a segment's steps.
      working_bytes: one step being differentiated.
      copied_bytes: copies of parameters or gradients beyond the arrays of the caller.
      recompute_factor: forward steps run again in the backward pass, by N; `m` for `m` levels, or somewhat
        less, since the last step of a segment need not be run to know where it starts. An upper bound: the
        compiler leaves out what a step's derivative does not read, such as its last matrix product. What a
        policy between "none" and "full" recomputes inside a step is not in it.
      provenance: "modelled": arithmetic, not a compiler's answer.
    """

    length: int
    segments: tuple[int, ...]
    kept_carries: int
    kept_bytes: int
    working_bytes: int
    copied_bytes: int
    recompute_factor: float
    provenance: Literal["modelled"] = "modelled"

    @property
    def total_bytes(self) -> int:
        """Kept, working and copied bytes: the temporaries of a step that is nothing but this scan."""
        return self.kept_bytes + self.working_bytes + self.copied_bytes


def nested_scan_bytes(
    length: int,
    *,
    carry_bytes: int,
    residual_bytes: int = 0,
    saved_bytes: int | None = None,
    segment: int | Literal["sqrt"] | None = None,
    levels: int | None = None,
) -> NestedScanBytes:
    """The price of `nested_scan` with these segments.

    With segments of k steps the backward pass holds N/k carries where segments start, and in the one
    segment that it is differentiating k times what the policy keeps of a step: with "full" the carry.

    Args:
      length: N.
      carry_bytes: bytes of the carry.
      residual_bytes: bytes alive while one step is differentiated, beside carries, parameters and gradients.
      saved_bytes: bytes that a policy other than "full" keeps of each step of one segment, for example
        `jaxmem.remat.residual_bytes` of the step; None for "full".
      segment, levels: as of `nested_scan`.

    Raises:
      InputError: a segment, a number of levels or a length below 1, or both segment and levels.

    >>> price = nested_scan_bytes(100, carry_bytes=2**25, segment=10)
    >>> price.kept_carries, price.kept_bytes // 2**20, price.copied_bytes, price.recompute_factor
    (20, 640, 0, 1.9)
    >>> nested_scan_bytes(1000, carry_bytes=1, levels=3).kept_carries  # 3 · ∛1000
    30
    """
    length = _whole("length", length)
    cuts = segment_lengths(length, segment, levels)
    if saved_bytes is None and cuts[-1:] != (1,):
        cuts = (*cuts, 1)  # "full" keeps where each step of the innermost segment starts, and nothing of the step
    carries, steps = _kept(length, cuts)
    return NestedScanBytes(
        length=length,
        segments=cuts,
        kept_carries=carries,
        kept_bytes=carries * carry_bytes + steps * (saved_bytes or 0),
        working_bytes=residual_bytes,
        copied_bytes=0,
        recompute_factor=(_forward_steps(length, cuts) - _first_run(length, cuts)) / length,
    )


def segment_lengths(length: int, segment: int | Literal["sqrt"] | None, levels: int | None) -> tuple[int, ...]:
    """The lengths of nested segments, outermost first, each below `length`; () where there is nothing to cut.

    >>> segment_lengths(100, "sqrt", None), segment_lengths(100, None, 3), segment_lengths(5, 7, None)
    ((10,), (25, 5), ())
    """
    if segment is not None and levels is not None:
        raise InputError(
            wanted="segment or levels",
            got=f"segment={segment!r} and levels={levels!r}",
            do="Leave one of them out; levels=2 is segment='sqrt'.",
        )
    if levels is not None:
        levels = _whole("levels", levels)
        base = _root(length, levels)
        lengths = tuple(base**power for power in range(levels - 1, 0, -1)) or (1,)
    elif segment in (None, "sqrt"):
        lengths = (_root(length, 2),)
    else:
        lengths = (_whole("segment", segment),)
    return tuple(cut for cut in lengths if cut < length)


_MEANING = {"segment": "number of steps of a segment", "levels": "depth of nesting", "length": "number of steps"}


def _whole(name: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise InputError(
            wanted=f"{name} to be a whole number of at least 1" + (" or 'sqrt'" if name == "segment" else ""),
            got=repr(value),
            do=f"Give the {_MEANING[name]}.",
        )
    return int(value)


def _root(length: int, power: int) -> int:
    """The smallest whole number whose power is at least `length`; in integers, since 1000 ** (1 / 3) is 9.99…"""
    base = 1
    while base**power < length:
        base += 1
    return base


def _kept(length: int, cuts: tuple[int, ...]) -> tuple[int, int]:
    """Carries, and steps of the innermost segment, held while `length` steps are differentiated."""
    cuts = tuple(cut for cut in cuts if cut < length)
    if not cuts:
        return 0, length
    carries, steps = _kept(cuts[0], cuts[1:])  # the whole segment holds at least as much as the remainder
    return -(-length // cuts[0]) + carries, steps


def _forward_steps(length: int, cuts: tuple[int, ...]) -> int:
    """Steps run to differentiate `length` steps whose start is known."""
    cuts = tuple(cut for cut in cuts if cut < length)
    if not cuts:
        return length
    segments, rest = divmod(length, cuts[0])
    run = _first_run(length, cuts) + segments * _forward_steps(cuts[0], cuts[1:])
    return run + (_forward_steps(rest, cuts[1:]) if rest else 0)


def _first_run(length: int, cuts: tuple[int, ...]) -> int:
    """Steps run to know where each segment starts; the outermost level's are the forward pass's own."""
    cuts = tuple(cut for cut in cuts if cut < length)
    return (length - 1) // cuts[0] * cuts[0] if cuts else 0
