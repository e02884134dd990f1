"""What the blocks of a problem are, as plain values: the same in every process, file and order of tracing.

Operations, shapes, dtypes, and who reads what count. Names of JAX's variables, identities of objects, source lines,
devices, and parameters of operations that choose no value (such as a constant's number) do not.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from typing import Any

from jaxmem._compat import called_jaxprs, effect_names
from jaxmem.jaxprs import is_value
from jaxmem.remat.auto._problem import Problem
from jaxmem.remat.auto._solve import Group


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """Blocks that are alike.

    Args:
      blocks: their names, in the order of the program.
      times: how often each runs: the lengths of the scans round it.
      last: nothing that is differentiated follows.
      values: those that a choice is made of, by index: "dot_general float32[8,64]".
      structure: a digest of everything else: all operations, and how they read one another.
    """

    blocks: tuple[str, ...]
    times: int
    last: bool
    values: tuple[str, ...]
    structure: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Content:
    """The blocks of a problem.

    Args:
      kinds: the distinct ones that are differentiated.
      others: names of blocks that nothing differentiates.
      scans: as of `Problem`.
    """

    kinds: tuple[Kind, ...]
    others: tuple[str, ...]
    scans: dict[str, int]

    @property
    def hash(self) -> str:
        """Equal for problems that a decision can be exchanged between."""
        return digest(dataclasses.asdict(self))


def digest(value: Any) -> str:
    """The SHA-256 of a JSON-ready value, whatever the order of its keys.

    >>> digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    True
    """
    said = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(said.encode()).hexdigest()


def content_of(problem: Problem) -> Content:
    """What the blocks of a problem are."""
    names: list[list[str]] = [[] for _ in problem.groups]
    for name, at in problem.group_of.items():
        names[at].append(name)
    kinds = []
    for group, blocks in zip(problem.groups, names, strict=True):
        free = problem.free[blocks[0]]
        kinds.append(
            Kind(
                blocks=tuple(blocks),
                times=group.times,
                last=group.last,
                values=tuple(_values(group)),
                structure=_structure(group, free),
            )
        )
    others = tuple(name for name in problem.free if name not in problem.group_of)
    return Content(kinds=tuple(kinds), others=others, scans=dict(problem.scans))


def _values(group: Group) -> Iterator[str]:
    """The values of a group's candidates in their order: what makes each, with its type."""
    c = group.candidates
    for v, maker in zip(c.values, c.maker, strict=True):
        op = "input" if maker < 0 else c.forward.jaxpr.eqns[c.equations[maker]].primitive.name
        yield f"{op} {_type(v.aval)}"


def _structure(group: Group, free: tuple[bool, ...]) -> str:
    c, forward = group.candidates, group.candidates.forward
    lines = [f"free {free} differentiated {forward.differentiated} outputs {forward.num_outputs}"]
    lines.append(f"residuals {c.is_residual.tolist()} once {c.fixed.tolist()}")
    return digest([*lines, *_lines(forward.jaxpr)])


def _lines(jaxpr) -> Iterator[str]:
    """A jaxpr with its variables numbered in the order in which they come."""
    number = {v: i for i, v in enumerate((*jaxpr.constvars, *jaxpr.invars))}
    atom = lambda v: f"{number[v]}" if is_value(v) else _type(v.aval)  # noqa: E731
    yield f"given {[_type(v.aval) for v in number]}"
    for eqn in jaxpr.eqns:
        read = [atom(v) for v in eqn.invars]
        for v in eqn.outvars:
            number[v] = len(number)
        yield f"{eqn.primitive.name} {read} {[_type(v.aval) for v in eqn.outvars]} {sorted(effect_names(eqn))}"
        for body in called_jaxprs(eqn):
            yield from _lines(body)
    yield f"gives {[atom(v) for v in jaxpr.outvars]}"


def _type(aval: Any) -> str:
    """`float32[8,64]`; the name of its class where a type has neither."""
    if not hasattr(aval, "shape"):
        return type(aval).__name__
    return f"{getattr(aval, 'dtype', '')}[{','.join(map(str, aval.shape))}]"
