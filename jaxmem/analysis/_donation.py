"""Which donated arguments found no output to share their buffer with."""

import re

import jax

from jaxmem._compat import kept_arguments
from jaxmem.analysis._hlo import Module
from jaxmem.analysis._records import DonationMiss
from jaxmem.analysis.attribution import program_arguments

_ALIAS = re.compile(r"\{[\d, ]*\}: \((\d+),")
_OUTPUT = re.compile(r"\{([\d, ]*)\}: \(\d+,")
_TYPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_NUMPY = {"pred": "bool", "s": "int", "u": "uint", "f": "float", "bf16": "bfloat16", "c64": "complex64"}


def donation_misses(compiled, module: Module, text: str, sizes: dict[int, int]) -> tuple[DonationMiss, ...]:
    """The donated leaves that keep their own buffer although they are dead after the step, largest first.

    Args:
      compiled: a `jax.stages.Compiled` with `args_info`.
      module: its HLO, and `text` what that was read from: the header holds the aliases.
      sizes: bytes of the entry's parameters by number.

    A leaf that the program does not use needs no buffer and is not listed.
    """
    infos = jax.tree.leaves(getattr(compiled, "args_info", None))
    kept = kept_arguments(compiled, len(infos))
    arguments = program_arguments(module, lambda path: "arguments")
    if kept is None or len(kept) != len(arguments):
        return ()
    header = text[: text.find("\n")]
    aliases = header[header.find("input_output_alias=") : header.find("entry_computation_layout=")]
    aliased = {int(number) for number in _ALIAS.findall(aliases)}
    taken = {found.replace(" ", "") for found in _OUTPUT.findall(aliases)}
    outputs = [
        (dtype, dims)
        for number, (dtype, dims) in enumerate(_output_types(module))
        if str(number) not in taken and taken != {""}
    ]
    misses = []
    for number, index in enumerate(kept):
        argument = arguments.get(number)
        if argument is None or number in aliased or not getattr(infos[index], "donated", False):
            continue
        found = _TYPE.match(argument.type)
        dtype_in, dims = found.groups() if found else (argument.type, "")
        dtype_out = next((dtype for dtype, shape in outputs if shape == dims), "")
        misses.append(
            DonationMiss(
                path=argument.path,
                size_bytes=sizes.get(number, 0),
                dtype_in=_dtype(dtype_in),
                dtype_out=_dtype(dtype_out),
            )
        )
    return tuple(sorted(misses, key=lambda miss: -miss.size_bytes))


def _output_types(module: Module) -> list[tuple[str, str]]:
    entry = module.computations.get(module.entry or "")
    return _TYPE.findall(entry.root.type) if entry and entry.root else []


def _dtype(name: str) -> str:
    """numpy's name of an HLO element type.

    >>> _dtype("bf16"), _dtype("s32"), _dtype("pred")
    ('bfloat16', 'int32', 'bool')
    """
    if name in _NUMPY:
        return _NUMPY[name]
    return f"{_NUMPY[name[0]]}{name[1:]}" if name[:1] in "suf" and name[1:].isdigit() else name
