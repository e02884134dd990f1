"""The part of a report that needs the compiler's buffers: where each byte is, and what to do about it."""

from collections.abc import Callable, Mapping
from typing import Any

from jaxmem.analysis._donation import donation_misses
from jaxmem.analysis._dtypes import argument_dtypes
from jaxmem.analysis.assignment import Assignment
from jaxmem.analysis.attribution import attribute
from jaxmem.analysis.hlo._parse import Module


def details(
    compiled,
    assignment: Assignment,
    module: Module,
    text: str,
    *,
    peak_bytes: int | None,
    code_bytes: int | None,
    backend: str,
    kind_of: Callable[[str], str] | None = None,
    saved_names: Mapping[tuple[str, int], str] | None = None,
) -> dict[str, Any]:
    """The fields of a `MemoryReport` that come from the buffers of a compiled program.

    Args:
      compiled: a `jax.stages.Compiled`.
      assignment: its buffers.
      module: its HLO, and `text` what that was read from.
      peak_bytes: that of the report, to which the kinds must sum.
      code_bytes: of the generated program.
      backend: platform compiled for.
      kind_of: kind of an argument from its path.
      saved_names: names of saved values by source line and number of elements.
    """
    sizes = {a.parameter: a.size_bytes for a in assignment.allocations if a.parameter is not None}
    misses = donation_misses(compiled, module, sizes)
    found = attribute(
        assignment, module, text, kind_of, saved_names=saved_names, donation_misses=misses, backend=backend
    )
    constants = assignment.bytes_by_kind().get("constant", 0)
    return {
        "buffer_provenance": "modelled" if assignment.source == "liveness" else "compiled",
        "by_kind": _sum_to(found.by_kind, found.total_bytes, peak_bytes, code=code_bytes or 0, constants=constants),
        "argument_dtypes": argument_dtypes(module, sizes, kind_of),
        "by_layer": found.by_layer,
        "buffers": found.buffers,
        "timeline": found.timeline,
        "padding_bytes": found.padding_bytes,
        "donation_misses": misses,
        "findings": found.findings,
    }


def _sum_to(by_kind, total: int, peak: int | None, **others: int) -> tuple[tuple[str, int], ...]:
    """With the bytes by which the peak is larger: constants and code as far as they reach, the rest nobody's."""
    kinds, left = dict(by_kind), (peak or total) - total
    for kind in ("constants", "code"):
        part = min(max(left, 0), others[kind])
        if part:
            kinds[kind] = kinds.get(kind, 0) + part
            left -= part
    if left:
        kinds["unattributed"] = kinds.get("unattributed", 0) + left
    return tuple(sorted(kinds.items(), key=lambda item: -item[1]))
