"""In which dtypes the arguments of a program are kept."""

from collections.abc import Callable

from jaxmem.analysis._kind_paths import undeclared_kind
from jaxmem.analysis._records import DtypeBytes
from jaxmem.analysis.attribution import program_arguments
from jaxmem.analysis.hlo._parse import Module
from jaxmem.analysis.hlo._types import arrays, dtype_name


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
