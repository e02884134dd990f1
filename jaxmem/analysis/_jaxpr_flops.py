"""Counts the matrix-product and convolution FLOPs that a traced function asks for, loops multiplied out."""

import dataclasses

import numpy as np
from jax.extend import core

from jaxmem._jaxpr_costs import calls_of, product_flops, rule_of
from jaxmem._scopes import BACKWARD_SCOPE, REMAT_SCOPE
from jaxmem._shown import Brief


@dataclasses.dataclass(frozen=True, kw_only=True)
class JaxprFlops(Brief):
    """What a jaxpr asks for in dots and convolutions, over all devices.

    Args:
      forward: outside the backward pass.
      backward: inside it, without what is recomputed.
      recompute: what checkpoints compute a second time.
      notes: sentences on what could not be counted exactly.
    """

    forward: int
    backward: int
    recompute: int
    notes: tuple[str, ...] = ()


def jaxpr_flops(jaxpr: "core.ClosedJaxpr | core.Jaxpr") -> JaxprFlops:
    """FLOPs of a (closed) jaxpr, by the pass that they belong to.

    A `while` body counts once and a `cond` counts its costliest branch: both are said in `notes`.

    >>> import jax, jax.numpy as jnp
    >>> jaxpr_flops(jax.make_jaxpr(jnp.dot)(jnp.ones((8, 4)), jnp.ones((4, 2)))).forward
    128
    """
    counter = _Counter()
    total = counter.jaxpr(jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr, "forward")
    return JaxprFlops(**dict(zip(_PARTS, total.tolist(), strict=True)), notes=counter.notes())


_PARTS = ("forward", "backward", "recompute")
_NONE = np.zeros(3, object)  # Python's integers: the FLOPs of a large step pass 2**63


class _Counter:
    """FLOPs of programs by the pass that calls them; each is looked at once a pass, however often it is called."""

    def __init__(self):
        self.known: dict[tuple[int, str], np.ndarray] = {}
        self.loops = self.branches = 0
        self.kernels: set[str] = set()

    def notes(self) -> tuple[str, ...]:
        notes = []
        if self.loops:
            notes.append(f"{self.loops} while loop(s) of unknown length: modelled FLOPs count the body once.")
        if self.branches:
            notes.append(f"{self.branches} conditional(s): modelled FLOPs take the costliest branch.")
        if self.kernels:
            notes.append(f"Modelled FLOPs leave out custom kernels: {', '.join(sorted(self.kernels))}.")
        return tuple(notes)

    def jaxpr(self, jaxpr: core.Jaxpr, part: str) -> np.ndarray:
        known = self.known.get((id(jaxpr), part))
        if known is None:
            flops = [self.equation(eqn, _part(str(eqn.source_info.name_stack), part)) for eqn in jaxpr.eqns]
            known = self.known[id(jaxpr), part] = sum(flops, start=_NONE)
        return known

    def equation(self, eqn, part: str) -> np.ndarray:
        rule = rule_of(eqn)
        if rule is not None and rule.kind == "kernel":
            # A report compares with what the compiler counts, which sees into no kernel: an estimate would not match.
            if eqn.primitive.name == "pallas_call":
                self.kernels.add(str(eqn.params.get("name") or eqn.primitive.name))
            return _NONE
        flops, calls = product_flops(eqn), calls_of(eqn)
        if flops is not None:
            return np.array([flops if name == part else 0 for name in _PARTS], object)
        if calls is None:
            return _NONE
        inside = [self.jaxpr(program, part) for program in calls.programs]
        total = calls.total(inside, lambda branches: max(branches, key=np.sum)) * calls.devices
        self.branches += calls.chooses and total.sum() > 0
        self.loops += calls.endless and total.sum() > 0
        return total


def _part(scope: str, outer: str) -> str:
    if outer == "recompute" or REMAT_SCOPE in scope:
        return "recompute"
    return "backward" if BACKWARD_SCOPE in scope else outer
