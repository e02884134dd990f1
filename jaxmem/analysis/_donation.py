"""Which donated arguments found no output to share their buffer with."""

import re

import jax

from jaxmem._compat import kept_arguments
from jaxmem.analysis._records import DonationMiss
from jaxmem.analysis.attribution import program_arguments
from jaxmem.analysis.hlo._parse import Module
from jaxmem.analysis.hlo._types import dtype_name

_TYPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")


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
        # XLA gives the output of one leaf the buffer of any other of its type: what is left over is told of the leaves
        # that come out otherwise than they went in.
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
    """The dtype of an output of that shape which no argument lends its buffer to; each is told of once."""
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
