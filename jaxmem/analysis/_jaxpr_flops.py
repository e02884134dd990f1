"""Counts the matrix-product and convolution FLOPs that a traced function asks for, loops multiplied out."""

import collections
import dataclasses

from jax.extend import core

from jaxmem._product_flops import product_flops
from jaxmem.analysis.hlo._flops import BACKWARD_SCOPE, REMAT_SCOPE


@dataclasses.dataclass(frozen=True, kw_only=True)
class JaxprFlops:
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
    return JaxprFlops(
        forward=total["forward"], backward=total["backward"], recompute=total["recompute"], notes=counter.notes()
    )


class _Counter:
    def __init__(self):
        self.known: dict[tuple[int, str], collections.Counter[str]] = {}
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

    def jaxpr(self, jaxpr: core.Jaxpr, part: str) -> collections.Counter[str]:
        known = self.known.get((id(jaxpr), part))
        if known is None:
            known = collections.Counter()
            for eqn in jaxpr.eqns:
                known.update(self.equation(eqn, _part(str(eqn.source_info.name_stack), part)))
            self.known[id(jaxpr), part] = known
        return known

    def equation(self, eqn, part: str) -> collections.Counter[str]:
        name = eqn.primitive.name
        flops = product_flops(eqn)
        if flops is not None:
            return collections.Counter({part: flops})
        inner = [self.jaxpr(j, part) for j in _sub_jaxprs(eqn)]
        if not inner:
            return collections.Counter()
        if name == "cond":
            self.branches += any(sum(branch.values()) for branch in inner)
            return max(inner, key=lambda branch: sum(branch.values()))
        total = collections.Counter()
        for counts in inner:
            total.update(counts)
        times = 1
        if name == "scan":
            times = eqn.params["length"]
        elif name == "shard_map":
            times = eqn.params["mesh"].size
        elif name == "while":
            self.loops += sum(total.values()) > 0
        elif name == "pallas_call":
            self.kernels.add(str(eqn.params.get("name") or name))
            return collections.Counter()  # its grid is not a loop of the jaxpr
        return collections.Counter({key: value * times for key, value in total.items()})


def _part(scope: str, outer: str) -> str:
    if outer == "recompute" or REMAT_SCOPE in scope:
        return "recompute"
    return "backward" if BACKWARD_SCOPE in scope else outer


def _sub_jaxprs(eqn):
    for value in eqn.params.values():
        for item in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(item, core.ClosedJaxpr):
                yield item.jaxpr
            elif isinstance(item, core.Jaxpr):
                yield item
