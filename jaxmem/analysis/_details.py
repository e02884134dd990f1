"""The part of a report that needs the compiler's buffers: where each byte is, and what to do about it."""

import collections
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jax.extend.core import ClosedJaxpr

from jaxmem.analysis._asked import Asked
from jaxmem.analysis._compiled import CompiledProgram
from jaxmem.analysis._donation import donation_misses, undonated
from jaxmem.analysis._kind_paths import undeclared_kind
from jaxmem.analysis._records import DtypeBytes
from jaxmem.analysis.attribution import attribute, program_arguments
from jaxmem.analysis.findings import findings
from jaxmem.analysis.hlo._module import Module
from jaxmem.analysis.hlo._types import arrays, dtype_name


def details(
    made: CompiledProgram,
    peak_bytes: int | None,
    code_bytes: int | None,
    asked: Asked,
    declared: Callable[[str], str] | None = None,
    saved_names: Mapping[tuple[str, int], str] | None = None,
    jaxpr: ClosedJaxpr | None = None,
) -> dict[str, Any]:
    """The fields of a `MemoryReport` that come from the buffers of a program; none where nothing tells of them.

    Args:
      made: the program.
      peak_bytes: that of the report, to which the kinds must sum.
      code_bytes: of the generated program.
      asked: what is analysed.
      declared: kind of an argument from its path, "" where nothing is declared.
      saved_names: names of saved values by source line and number of elements.
      jaxpr: of the program, where it is known.
    """
    module, assignment, signature = made.module, made.assignment, made.signature
    if module is None or made.text is None or assignment is None:
        return {}
    sizes = {a.parameter: a.size_bytes for a in assignment.allocations if a.parameter is not None}
    by_type = signature.kinds if signature else {}

    def kind_of(path: str) -> str:
        if declared and (kind := declared(path)):
            return kind
        kind = by_type.get(path, "arguments")
        return kind if kind != "arguments" else undeclared_kind(path)

    misses = donation_misses(signature, sizes) if signature else ()
    if signature is not None:
        donated = {(leaf.argument, signature.names[leaf.argument]) for leaf in signature.leaves if leaf.donated}
        asked = dataclasses.replace(asked, donated=tuple(donated), rows=_rows(module, kind_of))
    if not asked.parameters and module.name.startswith("jit_"):  # of a lowered program only this tells the function
        asked = dataclasses.replace(asked, function=module.name.removeprefix("jit_"))
    found = attribute(assignment, module, made.text, kind_of, saved_names=saved_names)
    constants = assignment.bytes_by_kind().get("constant", 0)
    return {
        "buffer_provenance": "modelled" if assignment.source == "liveness" else "compiled",
        "by_kind": _sum_to(found.by_kind, found.total_bytes, peak_bytes, code=code_bytes or 0, constants=constants),
        "argument_dtypes": argument_dtypes(module, sizes, kind_of),
        "by_layer": found.by_layer,
        "buffers": found.buffers,
        "timeline": found.timeline,
        "source_lines": found.source_lines,
        "padding_bytes": found.padding_bytes,
        "donation_misses": misses,
        "findings": findings(
            found.buffers,
            found.origins,
            module,
            asked,
            donation_misses=misses,
            kept_state=undonated(signature, sizes, kind_of, jaxpr) if signature else (),
            schedule=assignment.schedule,
        ),
    }


def _rows(module: Module, kind_of: Callable[[str], str]) -> int | None:
    """Rows of the batch on a device: the leading size that most of its arrays have."""
    batch = [a for a in program_arguments(module, kind_of).values() if a.kind == "batch"]
    sizes = collections.Counter(array.sizes[0] for a in batch for array in arrays(a.type)[:1] if array.sizes)
    return sizes.most_common(1)[0][0] if sizes else None


def _sum_to(by_kind, total: int, peak: int | None, **others: int) -> tuple[tuple[str, int], ...]:
    """The kinds, made to sum to the peak: missing bytes are constants and code, up to their size, then unattributed."""
    kinds, left = dict(by_kind), (peak or total) - total
    for kind in ("constants", "code"):
        part = min(max(left, 0), others[kind])
        if part:
            kinds[kind] = kinds.get(kind, 0) + part
            left -= part
    if left:
        kinds["unattributed"] = kinds.get("unattributed", 0) + left
    return tuple(sorted(kinds.items(), key=lambda item: -item[1]))


def argument_dtypes(module: Module, sizes: dict[int, int], kind_of: Callable[[str], str]) -> tuple[DtypeBytes, ...]:
    """Bytes of the arguments by kind and dtype, largest first.

    Args:
      module: the program's HLO.
      sizes: bytes of the entry's parameters by number.
      kind_of: kind of an argument from its path.
    """
    totals: dict[tuple[str, str], int] = {}
    for number, argument in program_arguments(module, kind_of).items():
        for array in arrays(argument.type)[:1]:  # a parameter is one array, a token none
            key = (argument.kind, dtype_name(array.dtype))
            totals[key] = totals.get(key, 0) + sizes.get(number, array.size_bytes)
    rows = [DtypeBytes(kind=kind, dtype=dtype, size_bytes=size) for (kind, dtype), size in totals.items()]
    return tuple(sorted(rows, key=lambda row: (-row.size_bytes, row.kind, row.dtype)))
