"""`Facts`: who makes and reads each value of a jaxpr, and what a backward pass would keep."""

import collections
import functools
import itertools
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

from jaxmem._compat import scan_layout
from jaxmem.jaxprs._equations import (
    BODIES,
    CHEAP,
    HEAVY,
    KEEPS_NOTHING,
    KEEPS_OUTPUT,
    TIE,
    USER_CHECKPOINT,
    WATCH,
    bodies,
    body_of,
    inputs_of,
    is_checkpoint,
    is_float,
    is_nested_scan,
    is_stacking,
    is_value,
    nested_segments,
    num_bytes,
)
from jaxmem.jaxprs._run import evaluate_with


class Facts:
    """One jaxpr, with facts per equation (by index) and per value.

    Args:
      jaxpr: the jaxpr.
      free: inputs that cost nothing to keep, because they are arguments of the whole loss.
      known: facts of bodies that were computed already, by identity of the jaxpr.
      marked: checkpoints of the user's own count as what is in them; else they are no work.
    """

    def __init__(self, jaxpr: jex.Jaxpr, free: frozenset, known: dict[Any, Any] | None = None, *, marked: bool = False):
        self.jaxpr, self.eqns, self.known = jaxpr, jaxpr.eqns, {} if known is None else known
        self.marked = marked
        self.made_at = {v: i for i, eqn in enumerate(self.eqns) for v in eqn.outvars}
        self.read_at = collections.defaultdict(list)
        for i, eqn in enumerate(self.eqns):
            for v in eqn.invars:
                if is_value(v):
                    self.read_at[v].append(i)
        self.returned = {v for v in jaxpr.outvars if is_value(v)}
        self.free = set(free) | set(jaxpr.constvars)
        for eqn in self.eqns:  # a cast weight is as good as the weight
            cheap = eqn.primitive.name in CHEAP or is_stacking(eqn)
            if cheap and all(v in self.free for v in eqn.invars if is_value(v)):
                self.free.update(eqn.outvars)
        self.heavy = [self._is_heavy(eqn) for eqn in self.eqns]
        self.heavy_before = list(itertools.accumulate(self.heavy, initial=0))
        self.kept = [self._keeps(eqn) for eqn in self.eqns]
        lives = [
            (self.made_at.get(v, -1), at[-1], num_bytes(v.aval)) for v, at in self.read_at.items() if v not in self.free
        ]
        self._lives = np.array(lives, np.int64).reshape(-1, 3).T
        needed = {v for values, _ in self.kept for v in values}
        made = [sum(num_bytes(v.aval) for v in eqn.outvars if v in needed) for eqn in self.eqns]
        inner = [extra for _, extra in self.kept]
        self.kept_before = list(itertools.accumulate(map(sum, zip(made, inner, strict=True)), initial=0))

    @classmethod
    def of(cls, program, *, marked: bool = False) -> "Facts":
        """Facts of a whole program, whose inputs are all there anyway."""
        jaxpr, _ = body_of(program)
        return cls(jaxpr, frozenset(jaxpr.invars), marked=marked)

    @functools.cached_property
    def constant(self) -> set:
        """Floating values without a derivative, whatever is differentiated: those behind a `stop_gradient`."""
        found = set()
        for eqn in self.eqns:
            read = [v for v in eqn.invars if is_value(v) and is_float(v.aval)]
            stopped = read and all(v in found for v in read)
            if stopped or eqn.primitive.name == "stop_gradient":
                found.update(v for v in eqn.outvars if is_float(v.aval))
        return found

    def is_stacked(self, v) -> bool:
        """Whether a variable is a floating output that a scan stacks."""
        eqn = self.eqns[self.made_at[v]] if v in self.made_at else None
        if eqn is None or eqn.primitive.name != "scan" or not is_float(v.aval):
            return False
        return list(eqn.outvars).index(v) >= scan_layout(eqn)[1]

    def num_heavy(self, start: int, stop: int) -> int:
        return self.heavy_before[stop] - self.heavy_before[start]

    def inside_bytes(self, indices) -> int:
        """Bytes that the backward pass of these equations needs and that they make themselves: what a block frees."""
        made = {v for i in indices for v in self.eqns[i].outvars}
        needed = {v for i in indices for v in self.kept[i][0]}
        return sum(num_bytes(v.aval) for v in needed & made) + sum(self.kept[i][1] for i in indices)

    def inputs(self, indices) -> list:
        """Values that these equations read and do not make, in order of first use."""
        return inputs_of([self.eqns[i] for i in indices])

    def outputs(self, indices) -> list:
        """Values that these equations make and that somebody else reads."""
        own = set(indices)
        return [
            v
            for i in indices
            for v in self.eqns[i].outvars
            if v in self.returned or any(reader not in own for reader in self.read_at.get(v, ()))
        ]

    def boundary_bytes(self, indices) -> int:
        """Bytes that must be kept to run these equations again."""
        return sum(num_bytes(v.aval) for v in self.inputs(indices) if v not in self.free)

    def crossing_bytes(self, period: int) -> list[int]:
        """Bytes that cross the point before equation i, for i in 0..n, of values made at most `period` equations ago.

        An older value crosses the cut a period before, too, and is kept once for both.
        """
        made, read, size = self._lives
        change = np.zeros(len(self.eqns) + 2, np.int64)
        np.add.at(change, made + 1, size)
        np.subtract.at(change, np.minimum(read, made + period) + 1, size)
        return np.cumsum(change).tolist()

    def of_body(self, eqn, which: int = 0) -> "Facts":
        """Facts of an equation's body, whose inputs are free where the equation's are."""
        body = bodies(eqn)[which]
        operands = eqn.invars[1:] if eqn.primitive.name == "cond" else eqn.invars
        is_free = [not is_value(v) or v in self.free for v in operands]
        if eqn.primitive.name == "scan":  # its inputs and constants are kept whole, whatever its body does
            num_consts, num_carry, _ = scan_layout(eqn)
            carries = range(num_consts, num_consts + num_carry)
            is_free = [i not in carries for i in range(len(is_free))]
        free = frozenset(v for v, yes in zip(body.invars, is_free, strict=True) if yes)
        key = (id(body), tuple(is_free))
        if key not in self.known:
            self.known[key] = Facts(body, free, self.known, marked=self.marked)
        return self.known[key]

    def holds_segments(self, eqn) -> bool:
        """Whether an equation recomputes something in which a scan is: a nested scan, or a user's checkpoint."""
        key = ("segments", id(eqn))
        if key not in self.known:
            name, inner = eqn.primitive.name, [each for body in bodies(eqn) for each in body.eqns]
            if name in USER_CHECKPOINT:
                found = any(_has_scan(body) for body in bodies(eqn))
            else:
                found = is_nested_scan(eqn) or bool(nested_segments(eqn)) or any(map(self.holds_segments, inner))
            self.known[key] = found
        return self.known[key]

    def _is_heavy(self, eqn) -> bool:
        name = eqn.primitive.name
        if name in HEAVY:
            return True
        if (name in USER_CHECKPOINT and not self.marked) or is_nested_scan(eqn):
            return False
        if name in BODIES or name in USER_CHECKPOINT:
            return any(any(self.of_body(eqn, i).heavy) for i in range(len(bodies(eqn))))
        rule = eqn.params.get("call_jaxpr")  # of a custom rule
        return isinstance(rule, (jex.Jaxpr, jex.ClosedJaxpr)) and _has_heavy(body_of(rule)[0], self.known)

    def _keeps(self, eqn) -> tuple[list, int]:
        """What differentiating an equation needs: values of this jaxpr, and bytes that only its body sees.

        A table of primitives and not a differentiation, so that it costs nothing; it errs on the side of keeping.
        """
        name = eqn.primitive.name
        floats_in = [v for v in eqn.invars if is_value(v) and is_float(v.aval)]
        if name in KEEPS_NOTHING or not any(is_float(v.aval) for v in eqn.outvars):
            return [], 0
        if name == "select_n":
            return [v for v in eqn.invars[:1] if is_value(v)], 0
        if name in KEEPS_OUTPUT:
            return list(eqn.outvars), 0
        if (name in USER_CHECKPOINT and not self.marked) or is_nested_scan(eqn):
            return floats_in, 0
        if name in BODIES or name in USER_CHECKPOINT:
            extra = 0
            for i in range(len(bodies(eqn))):
                inner = self.of_body(eqn, i)
                extra = max(extra, inner.inside_bytes(range(len(inner.eqns))))
            return floats_in, extra * eqn.params.get("length", 1)
        if name.startswith("custom_"):
            return floats_in + [v for v in eqn.outvars if is_float(v.aval)], 0
        return floats_in, 0


def _has_heavy(jaxpr, known) -> bool:
    key = ("heavy", id(jaxpr))
    if key not in known:
        known[key] = any(
            eqn.primitive.name in HEAVY
            or (eqn.primitive.name in BODIES and any(_has_heavy(b, known) for b in bodies(eqn)))
            for eqn in jaxpr.eqns
        )
    return known[key]


def _has_scan(jaxpr) -> bool:
    return any(eqn.primitive.name == "scan" or any(map(_has_scan, bodies(eqn))) for eqn in jaxpr.eqns)


def without_checkpoint(facts: Facts) -> Facts:
    """Facts of a body that is one checkpoint and nothing else, without the checkpoint; others as they are."""
    jaxpr = facts.jaxpr
    known = all(eqn.primitive.name in USER_CHECKPOINT | {WATCH, TIE} for eqn in jaxpr.eqns)
    if jaxpr.constvars or not known or not is_checkpoint(jaxpr):
        return facts

    def bare(eqn):
        if eqn.primitive.name in USER_CHECKPOINT:
            return jex.jaxpr_as_fun(jex.ClosedJaxpr(bodies(eqn)[0], ()))
        return lambda *values: values

    body = lambda *args: evaluate_with(jaxpr, (), args, bare)  # noqa: E731
    new = jax.make_jaxpr(body)(*[v.aval for v in jaxpr.invars]).jaxpr
    free = frozenset(b for a, b in zip(jaxpr.invars, new.invars, strict=True) if a in facts.free)
    return Facts(new, free, facts.known)
