"""The arguments and outputs of a program, leaf by leaf: what JAX says of them, and what the compiled program takes."""

import dataclasses
import functools
from typing import Any

import jax

from jaxmem._compat import kept_arguments
from jaxmem.analysis._kind_paths import undeclared_kind
from jaxmem.analysis._state_types import Recognised, paths_of_leaves, recognise, recognise_arguments
from jaxmem.analysis.attribution import program_arguments
from jaxmem.analysis.hlo._module import Module


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """A leaf of the arguments.

    Args:
      argument: number of the argument that it is in, those by keyword last.
      path: below that argument, ".params['w']".
      donated: whether its buffer may be reused.
    """

    argument: int
    path: str
    donated: bool


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Signature:
    """What a program is called with and returns.

    Args:
      module: the compiled program.
      args_info: `((argument, …), {keyword: argument})`, a tree whose leaves tell shape, dtype and donation.
      out_info: the tree of its outputs.
      kept: the leaves of the arguments that the compiled program takes: its parameter n is leaf `kept[n]`.
    """

    module: Module
    args_info: Any
    out_info: Any
    kept: tuple[int, ...]

    @classmethod
    def of(cls, stage: Any, module: Module) -> "Signature | None":
        """That of a `jax.stages.Lowered` or `Compiled`; None where its leaves cannot be told from one another."""
        info = getattr(stage, "args_info", None)
        kept = kept_arguments(stage, len(jax.tree.leaves(info))) if info is not None else None
        if kept is None or len(kept) != len(program_arguments(module, undeclared_kind)):
            return None
        _name_arguments(module, info, kept)
        return cls(module=module, args_info=info, out_info=getattr(stage, "out_info", None), kept=tuple(kept))

    @functools.cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """Of all arguments, in order."""
        positional, keywords = self.args_info
        return tuple(
            Leaf(argument=number, path=path, donated=getattr(leaf, "donated", False))
            for number, argument in enumerate([*positional, *keywords.values()])
            for path, leaf in zip(paths_of_leaves(argument), jax.tree.leaves(argument), strict=True)
        )

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Of the arguments; empty for a positional one that the program does not use."""
        positional, keywords = self.args_info
        found = [""] * len(positional) + [str(name) for name in keywords]
        for number, path in self.paths.items():
            leaf = self.leaves[self.kept[number]]
            if leaf.argument < len(positional) and path.endswith(leaf.path):
                found[leaf.argument] = path.removesuffix(leaf.path)
        return tuple(found)

    @functools.cached_property
    def paths(self) -> dict[int, str]:
        """Parameter of the compiled program → its path, "state.params['w']"."""
        return {n: argument.path for n, argument in program_arguments(self.module, undeclared_kind).items()}

    @functools.cached_property
    def arguments(self) -> Recognised:
        """What the types of the arguments tell."""
        return recognise_arguments(self.args_info, self.names)

    @functools.cached_property
    def outputs(self) -> Recognised:
        """What the types of the outputs tell."""
        return recognise(self.out_info)

    @functools.cached_property
    def kinds(self) -> dict[str, str]:
        """Path of each argument of the compiled program → its kind as its type tells, "arguments" where it does not."""
        return {path: self.arguments.kinds[self.kept[number]] for number, path in self.paths.items()}


def _name_arguments(module: Module, args_info: Any, kept: list[int]) -> None:
    """Gives the leaves of nnx objects, which `nnx.jit` passes as `model.states[0][1]`, their paths in the object."""
    positional, keywords = args_info
    arguments = [*positional, *keywords.values()]
    passed = [jax.tree_util.keystr(p) for each in arguments for p, _ in jax.tree_util.tree_leaves_with_path(each)]
    own = [path for each in arguments for path in paths_of_leaves(each)]
    entry = module.computations[module.entry or ""]
    for instruction in entry.instructions.values():
        if instruction.opcode == "parameter" and instruction.literal.isdigit():
            leaf = kept[int(instruction.literal)]
            given = instruction.argument_path
            if own[leaf] != passed[leaf] and given.endswith(passed[leaf]):
                name = given.removesuffix(passed[leaf]) + own[leaf]
                instruction.rest = instruction.rest.replace(f'"{instruction.op_name}"', f'"{name}"', 1)
