"""The part of a report that needs the compiler's buffers: where each byte is, and what to do about it."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxmem._compat import kept_arguments
from jaxmem.analysis._compiled import CompiledProgram
from jaxmem.analysis._kind_paths import undeclared_kind
from jaxmem.analysis._records import DonationMiss, DtypeBytes
from jaxmem.analysis.attribution import attribute, program_arguments
from jaxmem.analysis.findings import findings
from jaxmem.analysis.hlo._module import Module
from jaxmem.analysis.hlo._types import arrays, dtype_name

_TYPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


def details(
    made: CompiledProgram,
    peak_bytes: int | None,
    code_bytes: int | None,
    kind_of: Callable[[str], str] | None = None,
    saved_names: Mapping[tuple[str, int], str] | None = None,
) -> dict[str, Any]:
    """The fields of a `MemoryReport` that come from the buffers of a program; none where nothing tells of them.

    Args:
      made: the program.
      peak_bytes: that of the report, to which the kinds must sum.
      code_bytes: of the generated program.
      kind_of: kind of an argument from its path.
      saved_names: names of saved values by source line and number of elements.
    """
    module, assignment = made.module, made.assignment
    if module is None or made.text is None or assignment is None:
        return {}
    sizes = {a.parameter: a.size_bytes for a in assignment.allocations if a.parameter is not None}
    misses = donation_misses(made.compiled, module, sizes)
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
        "findings": findings(found.buffers, found.origins, module, misses, made.platform, assignment.schedule),
    }


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


def argument_dtypes(
    module: Module, sizes: dict[int, int], kind_of: Callable[[str], str] | None
) -> tuple[DtypeBytes, ...]:
    """Bytes of the arguments by kind and dtype, largest first.

    Args:
      module: the program's HLO.
      sizes: bytes of the entry's parameters by number.
      kind_of: kind of an argument from its path.
    """
    totals: dict[tuple[str, str], int] = {}
    for number, argument in program_arguments(module, kind_of or undeclared_kind).items():
        for array in arrays(argument.type)[:1]:  # a parameter is one array, a token none
            key = (argument.kind, dtype_name(array.dtype))
            totals[key] = totals.get(key, 0) + sizes.get(number, array.size_bytes)
    rows = [DtypeBytes(kind=kind, dtype=dtype, size_bytes=size) for (kind, dtype), size in totals.items()]
    return tuple(sorted(rows, key=lambda row: (-row.size_bytes, row.kind, row.dtype)))


def donation_misses(compiled, module: Module, sizes: dict[int, int]) -> tuple[DonationMiss, ...]:
    """The donated leaves that keep their own buffer although they are dead after the step, largest first.

    Args:
      compiled: a `jax.stages.Compiled` with `args_info`.
      module: its HLO.
      sizes: bytes of the entry's parameters by number.

    A leaf that the program does not use needs no buffer and is not listed.
    """
    infos = jax.tree.leaves(getattr(compiled, "args_info", None))
    kept = kept_arguments(compiled, len(infos))
    arguments = program_arguments(module, lambda path: "arguments")
    if kept is None or len(kept) != len(arguments):
        return ()
    aliased = {parameter for _, parameter, _ in module.output_aliases}
    taken = {output for output, _, _ in module.output_aliases}
    outputs = [
        (dtype, dims)
        for number, (dtype, dims) in enumerate(_output_types(module))
        if (number,) not in taken and taken != {()}
    ]
    inputs = _by_suffix(compiled.args_info, 2)  # ((args, kwargs), argument) come first
    outcome = getattr(compiled, "out_info", None)
    results = {suffix: dtype for depth in (0, 1) for suffix, dtype in _by_suffix(outcome, depth).values() if suffix}
    misses = []
    groups: dict[str, list[int]] = {}
    for number, index in enumerate(kept):
        if number in arguments and getattr(infos[index], "donated", False):
            groups.setdefault(arguments[number].type, []).append(number)
    for type_, numbers in groups.items():
        found = _TYPE.match(type_)
        dtype_in, dims = found.groups() if found else (type_, "")
        # XLA may give the output of one leaf the buffer of any other leaf of its type. The buffers left over are
        # reported for the leaves whose dtype changes.
        left = sum(number not in aliased for number in numbers)
        changed = [n for n in numbers if _changes(inputs[kept[n]], results)]
        rest = [n for n in numbers if n not in changed and n not in aliased]
        misses += [
            DonationMiss(
                path=arguments[number].path,
                size_bytes=sizes.get(number, 0),
                dtype_in=dtype_name(dtype_in),
                dtype_out=_taken(outputs, dims),
            )
            for number in [*changed, *rest][:left]
        ]
    return tuple(sorted(misses, key=lambda miss: -miss.size_bytes))


def _taken(outputs: list[tuple[str, str]], dims: str) -> str:
    """The dtype of an output of that shape that reuses no argument's buffer; each output is taken once."""
    found = next((output for output in outputs if output[1] == dims), None)
    if found is None:
        return ""
    outputs.remove(found)
    return dtype_name(found[0])


def _by_suffix(tree, depth: int) -> dict[int, tuple[str, str]]:
    """Number of a leaf → (its path below `depth`, its dtype)."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {n: (jax.tree_util.keystr(path[depth:]), str(leaf.dtype)) for n, (path, leaf) in enumerate(leaves)}


def _changes(leaf: tuple[str, str], results: dict[str, str]) -> bool:
    """Whether the output of the same path, if there is one, has another dtype."""
    suffix, dtype = leaf
    return results.get(suffix, dtype) != dtype


def _output_types(module: Module) -> list[tuple[str, str]]:
    entry = module.computations.get(module.entry or "")
    return _TYPE.findall(entry.root.type) if entry and entry.root else []
