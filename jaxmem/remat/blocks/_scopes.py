"""Repeated modules: what flax.linen and `jax.named_scope` leave in the name stack of each equation."""

import collections
import re
from typing import NamedTuple

from jaxmem._compat import name_stack
from jaxmem.remat.blocks._facts import Facts

_WRAPPER = re.compile(r"\b(?:jvp|transpose|vmap|pmap|jit|shard_map|checkpoint|rematted_computation)\(")


class Call(NamedTuple):
    """One call of a module: the equations `[start, stop)` under one scope."""

    name: str
    start: int
    stop: int


def paths_of(facts: Facts) -> list[tuple[str, ...]]:
    """The scopes of each equation, outermost first; those of transformations are taken off."""
    seen = {}

    def split(stack: str):
        if stack not in seen:
            plain = _WRAPPER.sub("", stack).replace(")", "") if "(" in stack else stack
            seen[stack] = tuple(part for part in plain.split("/") if part)
        return seen[stack]

    return [split(name_stack(eqn)) for eqn in facts.eqns]


def calls_at(paths, depth: int, start: int, stop: int) -> list[Call]:
    """Maximal runs of equations of `[start, stop)` that share the scope at `depth`."""
    calls, i = [], start
    while i < stop:
        name, first = paths[i][depth] if len(paths[i]) > depth else None, i
        while i < stop and (paths[i][depth] if len(paths[i]) > depth else None) == name:
            i += 1
        if name is not None:
            calls.append(Call(name, first, i))
    return calls


def repeated(calls: list[Call]) -> list[list[Call]]:
    """Calls of modules that differ only in their numbers (`Block_0`, `Block_1`; `stage1_block0`), by name."""
    groups = collections.defaultdict(list)
    for call in calls:
        groups[re.sub(r"\d+", "#", call.name)].append(call)
    return [group for group in groups.values() if len({call.name for call in group}) > 1]
