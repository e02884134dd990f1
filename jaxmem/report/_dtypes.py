"""The dtypes that a step's state is kept in, in words."""

from jaxmem._units import format_bytes
from jaxmem.analysis import MemoryReport

_SHOWN = ("parameters", "optimizer_state", "state")
_SHARE = 0.005  # of a kind: counts and keys are not worth a word


def state_dtypes(report: MemoryReport) -> list[tuple[str, str]]:
    """("optimizer state", "float32 1.00 GiB, bfloat16 512.00 MiB") and the like, of each kind of state."""
    rows = []
    for kind in _SHOWN:
        parts = [row for row in report.argument_dtypes if row.kind == kind]
        least = _SHARE * sum(row.size_bytes for row in parts)
        words = [f"{row.dtype} {format_bytes(row.size_bytes)}" for row in parts if row.size_bytes >= least]
        if words:
            rows.append((kind.replace("_", " "), ", ".join(words)))
    return rows
