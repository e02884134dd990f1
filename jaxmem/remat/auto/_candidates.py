"""`Candidates` and `Choice`: the values of one block that may be kept, as numbers for a solver."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jaxmem._compat import called_jaxprs, effect_names
from jaxmem.jaxprs import equations_in, is_value, num_bytes, stored_bytes
from jaxmem.remat.auto._costs import (
    COLLECTIVES,
    VIEWS,
    constant_cost,
    equation_cost,
    keep_seconds,
    offload_seconds,
    statistics,
)
from jaxmem.remat.auto._forward import Forward, happens_once
from jaxmem.remat.auto._rates import Rates


@dataclasses.dataclass(frozen=True)
class Choice:
    """What becomes of a block's values: indices into `Candidates.values`; what is in neither is recomputed."""

    kept: tuple[int, ...] = ()
    offloaded: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """A block's forward pass as arrays; values first, then equations, each in the order of the program.

    Args:
      forward: the block.
      values: variables that may be kept: what the needed equations make, and inputs that are not there anyway.
      equations: indices of the equations that the residuals need.
      value_bytes: per value, as the chip stores it.
      held_bytes: per value, its bytes in a working set: 0 where it is fused into what reads it, like a broadcast, or
        is a view of another residual.
      is_input: per value; an input cannot be recomputed.
      is_residual: per value, whether the pull-back reads it.
      seconds, flops: per equation, of running it again.
      keep_seconds, offload_seconds: per value.
      fixed: per equation, whether it must not run again.
    """

    forward: Forward
    values: tuple
    equations: tuple[int, ...]
    value_bytes: np.ndarray
    held_bytes: np.ndarray
    is_input: np.ndarray
    is_residual: np.ndarray
    seconds: np.ndarray
    flops: np.ndarray
    keep_seconds: np.ndarray
    offload_seconds: np.ndarray
    fixed: np.ndarray

    @functools.cached_property
    def plain(self) -> Choice:
        """Keeps every residual: what happens without remat."""
        return Choice(kept=tuple(np.flatnonzero(self.is_residual).tolist()))

    @functools.cached_property
    def least(self) -> Choice:
        """Keeps the inputs, and what must not run again."""
        return self.keeping(np.zeros(len(self.values), bool))

    def keeping(self, wanted: np.ndarray) -> Choice:
        """Keeps what is wanted (per value), what must not run again, and the inputs, as far as these are read."""
        once = np.array([e >= 0 and bool(self.fixed[e]) for e in self.maker], bool)
        read = self.read(Choice(kept=tuple(np.flatnonzero(wanted | once).tolist())))
        return Choice(kept=tuple(np.flatnonzero(read & (wanted | once | self.is_input)).tolist()))

    def products(self, *, batched: bool = True) -> Choice:
        """Keeps the outputs of matrix products as far as they are read; where `batched`, of those with batch dimensions
        too.
        """
        eqns = [self.forward.jaxpr.eqns[self.equations[e]] if e >= 0 else None for e in self.maker]
        return self.keeping(np.array([eqn is not None and _is_product(eqn, batched) for eqn in eqns], bool))

    def ending(self, end: str) -> Choice:
        """What the last block keeps: "everything", the outputs of its matrix "products", or its "inputs"."""
        return self.products() if end == "products" else {"everything": self.plain, "inputs": self.least}[end]

    def read(self, choice: Choice) -> np.ndarray:
        """Per value, whether the pull-back reads it, by itself or for what it computes again."""
        read = self.is_residual.copy()
        for e in np.flatnonzero(self.recomputed(choice)):
            read[list(self.reads[e])] = True
        return read

    @functools.cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """Per equation of `equations`, the values (by index) that it reads."""
        index = {v: i for i, v in enumerate(self.values)}
        return tuple(
            tuple(dict.fromkeys(index[v] for v in self.forward.jaxpr.eqns[e].invars if is_value(v) and v in index))
            for e in self.equations
        )

    @functools.cached_property
    def maker(self) -> np.ndarray:
        """Per value, the position in `equations` of what makes it; -1 for inputs."""
        position = {e: i for i, e in enumerate(self.equations)}
        return np.array([position.get(self.forward.made_at.get(v, -1), -1) for v in self.values], int)

    def recomputed(self, choice: Choice) -> np.ndarray:
        """Per equation, whether the backward pass runs it again."""
        there = np.zeros(len(self.values), bool)
        there[np.array([*choice.kept, *choice.offloaded], int)] = True
        runs = np.zeros(len(self.equations), bool)
        wanted = self.is_residual & ~there
        runs[self.maker[wanted & (self.maker >= 0)]] = True
        for e in range(len(self.equations) - 1, -1, -1):
            if runs[e]:
                for v in self.reads[e]:
                    if not there[v] and self.maker[v] >= 0:
                        runs[self.maker[v]] = True
        return runs

    def kept_bytes(self, choice: Choice) -> int:
        """Bytes on the device."""
        return int(self.value_bytes[list(choice.kept)].sum())

    def working_bytes(self, choice: Choice) -> int:
        """Bytes of the residuals that are not kept: all of them are there when the block's backward pass starts."""
        missing = self.is_residual.copy()
        missing[list(choice.kept)] = False
        return int(self.held_bytes[missing].sum())

    def end_bytes(self, choice: Choice) -> int:
        """Bytes of what is kept and of the residuals that are not, where nothing is stored for a later backward pass.

        There the compiler fuses broadcasts and views, kept or not.
        """
        there = self.is_residual.copy()
        there[list(choice.kept)] = True
        return int(self.held_bytes[there].sum())

    def recompute_flops(self, choice: Choice) -> float:
        """FLOPs of products and kernels that run a second time."""
        return float(self.flops[self.recomputed(choice)].sum())

    def price(self, choice: Choice, objective: str) -> float:
        """Seconds, or FLOPs with seconds as the tie-breaker, of recomputing and of keeping."""
        weights = self.weights(objective)
        kept, offloaded = list(choice.kept), list(choice.offloaded)
        runs = self.recomputed(choice)
        return float(weights.run[runs].sum() + weights.keep[kept].sum() + weights.offload[offloaded].sum())

    def weights(self, objective: str) -> "Weights":
        """What the objective adds up."""
        if objective == "seconds":
            return Weights(self.seconds, self.keep_seconds, self.offload_seconds)
        # A second counts as a thousandth of the FLOPs in it, so that FLOPs decide, and seconds between equals.
        per_second = (
            1e-3 * (self.flops.sum() / max(self.seconds[self.flops > 0].sum(), 1e-12)) if any(self.flops) else 1
        )
        return Weights(
            self.flops + per_second * self.seconds, per_second * self.keep_seconds, per_second * self.offload_seconds
        )


@dataclasses.dataclass(frozen=True)
class Weights:
    """The objective's coefficients: per equation that runs again, per value kept, per value offloaded."""

    run: np.ndarray
    keep: np.ndarray
    offload: np.ndarray


def candidates(forward: Forward, free: Sequence[bool], rates: Rates, shards: int = 1) -> Candidates:
    """The values of a block that may be kept.

    Args:
      forward: the block.
      free: per input, whether it is there anyway, like a weight.
      rates: of the chip, with its tiles.
      shards: among how many devices each value is divided; bytes and seconds are one device's, FLOPs are of all.
    """
    jaxpr = forward.jaxpr
    needed = forward.needed_for(forward.residuals, frozenset())
    held = {v for v, given in zip(jaxpr.invars, free, strict=True) if not given}
    read = forward.read_by(needed)
    inputs = [v for v in jaxpr.invars if v in held and v in read]
    made = [v for e in needed for v in jaxpr.eqns[e].outvars if v in read and num_bytes(v.aval) > 0]
    values, residuals = (*inputs, *made), {v for v in forward.residuals if is_value(v)}
    constant, split = _constants(forward), statistics(jaxpr)
    costs = [constant_cost() if e in constant else equation_cost(jaxpr.eqns[e], rates) for e in needed]
    sizes = [-(-stored_bytes(v.aval, rates.tiles) // shards) for v in values]
    return Candidates(
        forward=forward,
        values=values,
        equations=tuple(needed),
        value_bytes=np.array(sizes, np.int64),
        held_bytes=np.array(
            [0 if _is_fused(forward, v, residuals, constant) else n for v, n in zip(values, sizes, strict=True)],
            np.int64,
        ),
        is_input=np.array([i < len(inputs) for i in range(len(values))], bool),
        is_residual=np.array([v in residuals for v in values], bool),
        seconds=np.array([cost.seconds for cost in costs]) / shards,
        flops=np.array([cost.flops for cost in costs]),
        keep_seconds=np.array([keep_seconds(v.aval, rates, split_bytes=split.get(v, 0)) for v in values]) / shards,
        offload_seconds=np.array([offload_seconds(v.aval, rates) for v in values]) / shards,
        fixed=np.array([_runs_once(jaxpr.eqns[e]) for e in needed], bool),
    )


def _is_product(eqn, batched: bool) -> bool:
    return eqn.primitive.name == "dot_general" and (batched or not any(eqn.params["dimension_numbers"][1]))


def _runs_once(eqn) -> bool:
    """Whether an equation has an effect, or waits for other devices, itself or in what it calls."""
    inside = (inner for body in called_jaxprs(eqn) for inner in equations_in(body))
    return any(each.primitive.name in COLLECTIVES or happens_once(each) for each in (eqn, *inside))


def _constants(forward: Forward) -> set[int]:
    """Equations, by index, whose values depend on no array that the block is given."""
    given = {*forward.jaxpr.invars, *forward.jaxpr.constvars}
    found = set()
    for i, eqn in enumerate(forward.jaxpr.eqns):
        varying = any(is_value(v) and v in given for v in eqn.invars)
        if varying or effect_names(eqn) or (not eqn.invars and eqn.primitive.name != "iota"):
            given.update(eqn.outvars)
        else:
            found.add(i)
    return found


def _is_fused(forward: Forward, v, residuals: set, constant: set[int]) -> bool:
    """Whether a value takes no bytes of its own while a block's backward pass runs."""
    while (at := forward.made_at.get(v)) is not None:
        eqn = forward.jaxpr.eqns[at]
        if at in constant or eqn.primitive.name == "broadcast_in_dim":
            return True
        if eqn.primitive.name not in VIEWS or not is_value(eqn.invars[0]):
            return False
        v = eqn.invars[0]
        if v in residuals:
            return True
    return False
