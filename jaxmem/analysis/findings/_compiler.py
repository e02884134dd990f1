"""What a compiler undid, and what it made wrong."""

from jaxmem._miscompilations import Miscompilation
from jaxmem._units import format_flops
from jaxmem.analysis._records import Finding


def without_effect(recompute: int | None, asked: int) -> list[Finding]:
    """FLOPs that were `asked` for and are not recomputed: their residuals are kept. How many bytes, nobody tells."""
    if recompute is None or recompute >= asked:
        return []
    lost = format_flops(asked - recompute)
    return [
        Finding(
            kind="remat_without_effect",
            size_bytes=0,
            title=f"The compiler removed {lost} of the {format_flops(asked)} that rematerialisation asks "
            "to recompute: those residuals are kept after all (common-subexpression elimination).",
            cure="Put the layers under a scan, where nothing is merged, or believe the bytes of the target's compiler.",
        )
    ]


def wrong_numbers(fault: Miscompilation, places: tuple[str, ...]) -> Finding:
    return Finding(
        kind="miscompiled",
        size_bytes=0,
        title=f"This program computes wrong numbers: {fault.compiler} {fault.what} ({fault.name}).",
        evidence=places,
        cure=fault.cure,
    )
