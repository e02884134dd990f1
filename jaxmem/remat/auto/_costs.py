"""What it costs to run an equation again, and to keep a value: FLOPs, and seconds by a roofline.

A recomputed matrix product takes the longer of its arithmetic and its bytes. Everything elementwise is fused into what
reads it, so it is priced at a share of the bytes that it would move by itself; views and broadcasts at nearly nothing.
A kept value is written once and read back once, which on a TPU makes full remat faster than keeping attention scores.
"""

import dataclasses
import functools
import math

from jaxmem._compat import called_jaxprs
from jaxmem._product_flops import product_flops
from jaxmem.remat.auto._rates import Rates
from jaxmem.remat.jaxprs import is_value, num_bytes

VIEWS = frozenset(
    """broadcast_in_dim reshape squeeze expand_dims convert_element_type slice split iota name copy copy_p
    stop_gradient unstack pvary pbroadcast transpose rev real imag""".split()
)
# Run again, these would wait for other devices again: what they make is kept.
COLLECTIVES = frozenset(
    """psum psum2 psum_invariant pmax pmin all_gather all_gather_invariant all_gather_reduced all_to_all
    ragged_all_to_all ppermute pshuffle reduce_scatter psum_scatter unreduced_psum unreduced_reduce_scatter""".split()
)
_FUSED_SHARE = 0.3  # of the bytes that an elementwise equation would move alone
_VIEW_SHARE = 0.02
_KEEP_PASSES = 2.0  # a kept value is written, and read back
_LAUNCH_SECONDS = 1e-6  # of what is a kernel by itself
_STACK_SECONDS = 2e-7  # of a kept value, however small: mostly fused, it goes into a scan's stack and out of it
_FUSED_SECONDS = 1e-9  # breaks ties: what has fewer equations
_KERNELS = ("reduce_", "arg", "cum", "sort", "scatter", "gather", "dynamic_", "top_k", "fft", "random_bits")


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of running something once: FLOPs of products and kernels, and seconds, modelled."""

    flops: float = 0.0
    seconds: float = 0.0

    def times(self, count: float) -> "Cost":
        return Cost(self.flops * count, self.seconds * count)

    def __add__(self, other: "Cost") -> "Cost":
        return Cost(self.flops + other.flops, self.seconds + other.seconds)


def keep_seconds(aval, rates: Rates, *, split_bytes: int = 0) -> float:
    """Of keeping a value on the device; `split_bytes` are read once more where it is kept: see `statistics`."""
    passes = _KEEP_PASSES * num_bytes(aval) + rates.statistic_passes * split_bytes
    return passes / rates.hbm_bytes_per_second + _STACK_SECONDS


def statistics(jaxpr) -> dict:
    """Values that a reduction makes of at least eight times their bytes, or small arithmetic of such: → those bytes.

    A norm's or softmax's row statistics are made in the pass that uses them. Kept, they split it: the compiled step of
    a GPT's layers on an H100 has a pass over the scores more, and takes 7 % longer, where the softmax's maxima stay.
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
    """Of keeping a value in host memory: there and back, half of it behind arithmetic."""
    return num_bytes(aval) / rates.host_bytes_per_second


def equation_cost(eqn, rates: Rates) -> Cost:
    """Of running an equation again."""
    name = eqn.primitive.name
    moved = sum(num_bytes(v.aval) for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "shape"))
    memory = moved / rates.hbm_bytes_per_second
    flops = product_flops(eqn)
    if flops is not None:
        rate = rates.matmul(eqn.invars[0].aval.dtype)
        return Cost(flops, max(flops / rate, memory) + _LAUNCH_SECONDS)
    if name == "pallas_call" or name.startswith(("ffi_call", "dot_product_attention")):
        flops = _kernel_flops(eqn)
        return Cost(flops, max(2 * flops / rates.matmul(eqn.invars[0].aval.dtype), memory) + _LAUNCH_SECONDS)
    bodies = called_jaxprs(eqn)
    if bodies:
        inner = [jaxpr_cost(body, rates) for body in bodies]
        if name == "cond":
            return max(inner, key=lambda cost: cost.seconds)
        return functools.reduce(Cost.__add__, inner).times(eqn.params.get("length", 1))
    share = _VIEW_SHARE if name in VIEWS else _FUSED_SHARE
    alone = name.startswith(_KERNELS) and name != "reduce_precision"
    return Cost(0.0, share * memory + (_LAUNCH_SECONDS if alone else _FUSED_SECONDS))


def constant_cost() -> Cost:
    """Of running again what depends on no input, like a causal mask: it is fused into what reads it."""
    return Cost(0.0, _FUSED_SECONDS)


def jaxpr_cost(jaxpr, rates: Rates) -> Cost:
    """Of running a whole program."""
    return functools.reduce(Cost.__add__, (equation_cost(eqn, rates) for eqn in jaxpr.eqns), Cost())


def _kernel_flops(eqn) -> float:
    """What a kernel's author states; else its body's products over its grid; else those of attention on its inputs."""
    stated = getattr(eqn.params.get("cost_estimate"), "flops", None)
    if stated:
        return float(stated)
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    body = sum(_body_flops(body) for body in called_jaxprs(eqn))
    if body and all(isinstance(size, int) for size in grid):
        return body * math.prod(grid)
    shapes = [shape for v in eqn.invars if is_value(v) and len(shape := getattr(v.aval, "shape", ())) == 4]
    if len(shapes) >= 2:
        batch, queries, heads, width = shapes[0]
        return 4.0 * batch * queries * shapes[1][1] * heads * width
    return 2.0 * sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape"))


def _body_flops(jaxpr) -> float:
    """Of the products of a program, its loops multiplied out."""
    total = 0.0
    for eqn in jaxpr.eqns:
        inside = sum(map(_body_flops, called_jaxprs(eqn))) * eqn.params.get("length", 1)
        total += product_flops(eqn) or inside
    return total
