"""What it costs to run an equation again, and to keep a value: FLOPs, and seconds by a roofline.

A recomputed matrix product takes the longer of its bytes and its arithmetic, on a GPU by the tiles of its result.
Everything elementwise is fused into what reads it, so it is priced at a share of the bytes that it would move by
itself; views and broadcasts at nearly nothing.
A kept value is written once and read back once, which on a TPU makes full remat faster than keeping attention scores.
"""

import dataclasses
import functools
import math

from jaxmem._jaxpr_costs import COLLECTIVES as COLLECTIVES
from jaxmem._jaxpr_costs import VIEWS as VIEWS
from jaxmem._jaxpr_costs import calls_of, product_flops, rule_of
from jaxmem._product_tiles import busy_share
from jaxmem.jaxprs import is_value, num_bytes
from jaxmem.remat.auto._rates import Rates

# Without each, so many of 224 budgets on 14 problems are dearer by 0.1 % in seconds as modelled with all of them.
_FUSED_SHARE = 0.3  # of the bytes that an elementwise equation would move alone; with all of them 141, by up to 61 %
_VIEW_SHARE = 0.02  # with none of their bytes 28, by up to 0.5 %; with the share of the others 70, by up to 12 %
_KEEP_PASSES = 2.0  # a kept value is written, and read back; with one pass 107, by up to 32 %
_LAUNCH_SECONDS = 1e-6  # of what is a kernel by itself; 79, the most where arrays are small
_STACK_SECONDS = 2e-7  # of a kept value, however small: mostly fused, it goes into a scan's stack and out of it; 113
_FUSED_SECONDS = 1e-9  # breaks ties in favour of fewer equations; 4, by up to 0.2 %


@dataclasses.dataclass(frozen=True)
class Cost:
    """What running something once costs: FLOPs of products and kernels, and seconds, modelled."""

    flops: float = 0.0
    seconds: float = 0.0

    def times(self, count: float) -> "Cost":
        return Cost(self.flops * count, self.seconds * count)

    __mul__ = times

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.seconds + other.seconds)


def keep_seconds(aval, rates: Rates, *, split_bytes: int = 0) -> float:
    """Seconds of keeping a value on the device; keeping a statistic reads `split_bytes` once more: see `statistics`."""
    passes = _KEEP_PASSES * num_bytes(aval) + rates.statistic_passes * split_bytes
    return passes / rates.hbm_bytes_per_second + _STACK_SECONDS


def statistics(jaxpr) -> dict:
    """Row statistics, each with the bytes that it was reduced from, which are at least eight times its own.

    Small arithmetic on a statistic is one too. A norm or a softmax computes them in the pass that uses them. Keeping
    them splits that pass: the compiled step of a GPT's layers on an H100 reads the scores once more, and takes 7 %
    longer, where the maxima of the softmax are kept.
    """
    found = {}
    for eqn in jaxpr.eqns:
        arrays = [v for v in eqn.invars if is_value(v)]
        read = sum(num_bytes(v.aval) for v in arrays)
        for v in eqn.outvars:
            size = max(1, num_bytes(v.aval))
            if eqn.primitive.name.startswith("reduce_") and eqn.primitive.name != "reduce_precision":
                if read >= 8 * size:
                    found[v] = read
            elif product_flops(eqn) is None and read <= 3 * size < 24 * read:
                split = max((found.get(u, 0) for u in arrays), default=0)
                found |= {v: split} if split else {}
    return found


def offload_seconds(aval, rates: Rates) -> float:
    """Seconds of keeping a value in host memory: the way there and back, half of it hidden behind arithmetic."""
    return num_bytes(aval) / rates.host_bytes_per_second


def equation_cost(eqn, rates: Rates) -> Cost:
    """The cost of running an equation again, on one device."""
    rule, calls = rule_of(eqn), calls_of(eqn)
    moved = sum(num_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "shape"))
    memory = moved / rates.hbm_bytes_per_second
    if rule is not None and rule.flops is not None:
        flops = rule.flops(eqn)
        # A kernel is taken to run at half the rate of a library's product.
        ideal = (2 * flops if rule.kind == "kernel" else flops) / rates.matmul(eqn.invars[0].aval.dtype)
        ideal /= _busy_share(eqn, rates)
        return Cost(flops, max(ideal, memory) + _LAUNCH_SECONDS)
    if calls is not None:
        # Of a conditional the slowest branch counts, since seconds are what a budget minimises; a report of FLOPs
        # takes the one of most FLOPs.
        return calls.total([jaxpr_cost(p, rates) for p in calls.programs], functools.partial(max, key=_seconds))
    kind = rule.kind if rule is not None else "elementwise"
    share = _VIEW_SHARE if kind == "view" else _FUSED_SHARE
    return Cost(0.0, share * memory + (_LAUNCH_SECONDS if kind == "pass" else _FUSED_SECONDS))


def _busy_share(eqn, rates: Rates) -> float:
    """The share of a GPU that a matrix product keeps busy; of what else there is nothing is known."""
    if eqn.primitive.name != "dot_general" or rates.multiprocessors is None:
        return 1.0
    (contracted, _), (batched, _) = eqn.params["dimension_numbers"]
    lhs, result = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    batch = math.prod(lhs[d] for d in batched)
    rows = math.prod(n for d, n in enumerate(lhs) if d not in (*contracted, *batched))
    columns = math.prod(result) // max(1, batch * rows)
    return busy_share(batch, rows, columns, rates.multiprocessors) if batch * rows * columns else 1.0


def _seconds(cost: Cost) -> float:
    return cost.seconds


def constant_cost() -> Cost:
    """The cost of running again what depends on no input, like a causal mask: it is fused into what reads it."""
    return Cost(0.0, _FUSED_SECONDS)


def jaxpr_cost(jaxpr, rates: Rates) -> Cost:
    """The cost of running a whole program."""
    return functools.reduce(Cost.__add__, (equation_cost(eqn, rates) for eqn in jaxpr.eqns), Cost())
