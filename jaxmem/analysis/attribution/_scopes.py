"""JAX's scope paths taken apart: phase, module path, operation.

`jit(step)/transpose(jvp(GPT))/while/body/closed_call/blocks/mlp_in/dot_general` is the operation dot_general
of GPT/blocks/mlp_in in the backward pass.
"""

import functools
import re
from typing import NamedTuple

from jaxmem._scopes import ACCUMULATE_SCOPE, OPTIMIZER_SCOPE, REMAT_SCOPE
from jaxmem.analysis._records import Phase

# Scopes that transformations and control flow open; none of them is a module.
_STRUCTURE = frozenset(
    "while body cond closed_call checkpoint rematted_computation remat remat2 custom_jvp_call custom_vjp_call "
    "custom_vjp_call_jaxpr pjit shard_map scan core_call xla_call named_call eval_jaxpr".split()
)
_BRANCH = re.compile(r"branch_\d+_fun$")
_WRAPPED = re.compile(r"^(\w+)\((.*)\)$", re.DOTALL)
_DEEPEST = 32  # modules in one another; a log may hold any text, which must not take long
_TRANSFORMS = frozenset("jvp transpose vmap pmap partial_eval linearize".split())


class Scope(NamedTuple):
    """A scope path taken apart: pass of the step, module path ("" outside any), and JAX's name of the operation."""

    phase: Phase
    layer: str
    op: str


NO_SCOPE = Scope("", "", "")


@functools.lru_cache(maxsize=65536)
def parse_scope(op_name: str) -> Scope:
    """A scope path taken apart.

    >>> parse_scope("jit(step)/transpose(jvp(GPT))/while/body/closed_call/blocks/mlp_in/dot_general")
    Scope(phase='backward', layer='GPT/blocks/mlp_in', op='dot_general')
    >>> parse_scope("jit(f)/mul;jit(f)/add").op
    'mul'
    >>> parse_scope("jit(f)/jvp(M)/checkpoint/rematted_computation/Block_0.call/Block_0/exp")
    Scope(phase='recompute', layer='M/Block_0', op='exp')
    """
    parts = _split(op_name.partition(";")[0])  # merged operations carry both paths
    phase: Phase = ""
    layers: list[str] = []
    after_jit = False
    for part in parts[:-1]:
        names, transforms, called = _unwrap(part)
        if "transpose" in transforms:
            phase = "backward" if phase != "recompute" else phase
        elif "jvp" in transforms and not phase:
            phase = "forward"
        if part == REMAT_SCOPE:
            phase = "recompute"
        elif part == OPTIMIZER_SCOPE:
            phase = "update"
        if not called:
            layers += [_without_method(n) for n in names if _is_module(n, after_jit)]
        after_jit = called
    return Scope(phase, "/".join(_without_repeats(layers)), _unwrap(parts[-1])[0][-1] if parts else "")


def _split(op_name: str) -> list[str]:
    """At the slashes outside parentheses."""
    parts, depth, start = [], 0, 0
    for i, char in enumerate(op_name):
        if char == "(":
            depth += 1
        elif char == ")":
            depth = max(0, depth - 1)
        elif char == "/" and depth == 0:
            parts.append(op_name[start:i])
            start = i + 1
    parts.append(op_name[start:])
    return [part for part in parts if part]


def _unwrap(part: str) -> tuple[list[str], set[str], bool]:
    """The scopes inside transforms, the transforms, and whether it is a jitted function's name."""
    transforms: set[str] = set()
    while found := _WRAPPED.match(part):
        outer, inner = found.groups()
        if outer in ("jit", "pjit"):
            return [inner], transforms, True
        if outer not in _TRANSFORMS:
            break
        transforms.add(outer)
        part = inner
    return [name for name in part.split("/") if name] or [""], transforms, False


def _is_module(name: str, after_jit: bool) -> bool:
    if not name or name in _STRUCTURE or name in (OPTIMIZER_SCOPE, ACCUMULATE_SCOPE) or _BRANCH.match(name):
        return False
    if "->" in name or "," in name or "(" in name:  # einsum's own scope, or a transform of a jitted function
        return False
    # Qualified names of Python functions: of a jitted one, or of a method that flax calls.
    return not (after_jit and "." in name)


def _without_method(name: str) -> str:
    """Flax calls a module's method other than `__call__` "module.method"."""
    module, _, method = name.rpartition(".")
    return module if module and method.isidentifier() else name


def _without_repeats(layers: list[str]) -> list[str]:
    """A checkpointed module's path comes twice: once where it is called, once inside."""
    kept: list[str] = []
    for name in layers:
        if not kept or kept[-1] != name:
            kept.append(name)
    for size in range(min(len(kept) // 2, _DEEPEST), 1, -1):
        for at in range(len(kept) - 2 * size + 1):
            if kept[at : at + size] == kept[at + size : at + 2 * size]:
                return kept[: at + size] + kept[at + 2 * size :]
    return kept
