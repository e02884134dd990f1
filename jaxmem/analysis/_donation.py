"""What donation came to: donated leaves that no output takes, and state that is returned anew and not donated."""

import collections
import dataclasses
import re
from collections.abc import Callable, Mapping

import jax
from jax.extend.core import ClosedJaxpr

from jaxmem.analysis._records import DonationMiss
from jaxmem.analysis._signature import Signature
from jaxmem.analysis._updated import unchanged_outputs, updated_arguments
from jaxmem.analysis.attribution import program_arguments
from jaxmem.analysis.hlo._module import Module
from jaxmem.analysis.hlo._types import dtype_name

_TYPE = re.compile(r"([a-z]\w*)\[([\d,]*)\]")
_TRAINED = ("parameters", "optimizer_state", "accumulators", "state")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Undonated:
    """An argument that holds training state, which the program returns anew while the old one stays.

    Args:
      argument: its name; `number` in the order of the arguments, those by keyword last.
      size_bytes: of its leaves that an output would take the buffer of, were they donated.
      kinds: of these leaves, those with most bytes first.
      whole: whether all of the argument is returned, so that nothing else is lost with it.
    """

    argument: str
    number: int
    size_bytes: int
    kinds: tuple[str, ...]
    whole: bool


def undonated(
    signature: Signature, sizes: Mapping[int, int], kind_of: Callable[[str], str], jaxpr: ClosedJaxpr | None = None
) -> tuple[Undonated, ...]:
    """The arguments whose donation would save bytes, in order.

    An output counts as the next value of an argument where both are one of the containers that only training state
    comes in. Parameters in other containers count beside such a state, where an output is the parameter with something
    added: a gradient has the shape of a parameter, too.

    Args:
      signature: of the program.
      sizes: bytes of the compiled program's parameters by number.
      kind_of: kind of an argument from its path.
      jaxpr: of the program, where it is known.
    """
    types = _output_types(signature.module)
    # With graph=False nnx.jit returns what changed as a list, without what it belongs to.
    listed = any("._values[" in path for path, _ in _by_suffix(signature.out_info, 0).values())
    if listed or len(types) != len(signature.outputs.kinds):
        return ()
    successors = _successors(signature, jaxpr)
    free = _free_outputs(signature.module, len(types)) - set(unchanged_outputs(jaxpr) if jaxpr else ())
    # JAX gives a donated buffer to the first output of its type, whichever value that is the next of.
    places = collections.Counter(types[output] for output in free & set(successors.values()))
    arguments = program_arguments(signature.module, kind_of)
    saved: dict[int, collections.Counter[str]] = {}
    for number, argument in arguments.items():
        leaf, found = signature.leaves[signature.kept[number]], _TYPE.match(argument.type)
        output = successors.get(signature.kept[number])
        if leaf.donated or output is None or found is None or argument.kind not in _TRAINED:
            continue
        type_ = (found[1], found[2])
        if type_ == types[output] and places[type_]:
            places[type_] -= 1
            saved.setdefault(leaf.argument, collections.Counter())[argument.kind] += sizes.get(number, 0)
    return tuple(
        Undonated(
            argument=signature.names[number],
            number=number,
            size_bytes=by_kind.total(),
            kinds=tuple(kind for kind, _ in by_kind.most_common()),
            whole=all(index in successors for index, leaf in enumerate(signature.leaves) if leaf.argument == number),
        )
        for number, by_kind in sorted(saved.items())
    )


def _successors(signature: Signature, jaxpr: ClosedJaxpr | None) -> dict[int, int]:
    """Leaf of the arguments → the leaf of the outputs that is its next value."""
    found: dict[int, int] = {}
    left = list(signature.arguments.states)
    for after in signature.outputs.states:
        before = next((state for state in left if state.type is after.type), None)
        if before is not None:
            left.remove(before)
            found |= {leaf: after.leaves[path] for path, leaf in before.leaves.items() if path in after.leaves}
    if jaxpr is None or not found:
        return found
    same = {argument: output for output, argument in unchanged_outputs(jaxpr).items()}
    for leaf, output in {**same, **updated_arguments(jaxpr)}.items():
        found.setdefault(leaf, output)
    return found


def _free_outputs(module: Module, count: int) -> set[int]:
    """The outputs with a buffer of their own that is no copy of an argument."""
    taken = {output for output, _, _ in module.output_aliases}
    if () in taken:  # the only output
        return set()
    root = module.computations[module.entry or ""].root
    assert root is not None
    free = {number for number in range(count) if (number,) not in taken}
    return {n for n in free if root.opcode != "tuple" or not _is_argument(module, root.operands[n])}


def _is_argument(module: Module, name: str) -> bool:
    made = module.instruction(name)
    while made is not None and made.opcode in ("copy", "bitcast", "copy-done", "copy-start"):
        made = module.operand(made, 0)
    return made is not None and made.opcode == "parameter"


def donation_misses(signature: Signature, sizes: Mapping[int, int]) -> tuple[DonationMiss, ...]:
    """The donated leaves that keep their own buffer although they are dead after the step, largest first.

    A leaf that the program does not use needs no buffer and is not listed.

    Args:
      signature: of the program.
      sizes: bytes of the compiled program's parameters by number.
    """
    module, kept = signature.module, signature.kept
    arguments = program_arguments(module, lambda path: "arguments")
    aliased = {parameter for _, parameter, _ in module.output_aliases}
    taken = {output for output, _, _ in module.output_aliases}
    outputs = [
        (dtype, dims)
        for number, (dtype, dims) in enumerate(_output_types(module))
        if (number,) not in taken and taken != {()}
    ]
    inputs = _by_suffix(signature.args_info, 2)  # ((args, kwargs), argument) come first
    results = {suffix: dtype for d in (0, 1) for suffix, dtype in _by_suffix(signature.out_info, d).values() if suffix}
    misses = []
    groups: dict[str, list[int]] = {}
    for number in arguments:
        if signature.leaves[kept[number]].donated:
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
