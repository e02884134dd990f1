"""What the equations of a jaxpr cost: a table of rules by primitive, and how often the programs in them run.

Reports count FLOPs by it, budgets of rematerialisation FLOPs and seconds. What has neither a rule nor a program of its
own is taken for elementwise; `unknown_primitives` tells what that is of a program.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax.extend.core as jex

from jaxmem._compat import called_jaxprs
from jaxmem._product_flops import WindowDimension, convolution_flops, dot_flops

Kind = Literal["product", "kernel", "view", "pass", "elementwise"]


class Rule(NamedTuple):
    """How a primitive runs.

    Args:
      kind: a matrix product or convolution; a kernel, of which only its author or its arguments tell the arithmetic; a
        view, which moves next to nothing; a pass over memory by itself; or elementwise, fused into what reads it.
      flops: of an equation: exact of a product, an estimate of a kernel.
      waits: for other devices.
    """

    kind: Kind
    flops: Callable[[jex.JaxprEqn], float] | None = None
    waits: bool = False


def rule_of(eqn: jex.JaxprEqn) -> Rule | None:
    """The rule of an equation's primitive; None where the table has none."""
    name = eqn.primitive.name
    return _RULES.get(name) or next((rule for prefix, rule in _FAMILIES.items() if name.startswith(prefix)), None)


def product_flops(eqn: jex.JaxprEqn) -> float | None:
    """FLOPs of an equation that is a matrix product or a convolution; None of any other.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(lambda a, b: jnp.sin(a @ b))(jnp.ones((8, 4)), jnp.ones((4, 2)))
    >>> [product_flops(eqn) for eqn in program.eqns]
    [128, None]
    """
    rule = rule_of(eqn)
    return rule.flops(eqn) if rule and rule.flops and rule.kind == "product" else None


class Calls(NamedTuple):
    """The programs that an equation runs.

    Args:
      programs: all of them once, or one of several.
      times: trips of a scan.
      devices: that a shard_map runs them on.
      chooses: whether one of them runs, as of a cond.
      endless: whether nobody knows how often, as of a while loop: counted once.
    """

    programs: list[jex.Jaxpr]
    times: int = 1
    devices: int = 1
    chooses: bool = False
    endless: bool = False

    def total(self, costs: Sequence[Any], choose: Callable[[Sequence[Any]], Any]) -> Any:
        """The cost of the equation on one device.

        Args:
          costs: of one run of each program; anything that adds up, and can be multiplied by a number.
          choose: the cost that stands for all branches of a conditional.
        """
        return (choose(costs) if self.chooses else sum(costs[1:], start=costs[0])) * self.times


def calls_of(eqn: jex.JaxprEqn) -> Calls | None:
    """The programs that an equation runs; None where there are none.

    >>> import jax
    >>> program = jax.make_jaxpr(lambda x: jax.lax.scan(lambda c, _: (c * 2, None), x, None, length=5))(1.0)
    >>> calls_of(program.eqns[0]).times
    5
    """
    programs, name = called_jaxprs(eqn), eqn.primitive.name
    if not programs:
        return None
    return Calls(
        programs,
        times=eqn.params.get("length", 1),
        devices=eqn.params["mesh"].size if name == "shard_map" else 1,
        chooses=name == "cond",
        endless=name == "while",
    )


def unknown_primitives(jaxpr: jex.Jaxpr) -> tuple[str, ...]:
    """Names of the primitives of a program, at any depth, that no rule knows: they are taken for elementwise.

    >>> import jax, jax.numpy as jnp
    >>> program = jax.make_jaxpr(lambda a: jnp.linalg.cholesky(a) @ a)(jnp.eye(3))
    >>> unknown_primitives(program.jaxpr)
    ('cholesky',)
    """
    found: set[str] = set()
    for eqn in jaxpr.eqns:
        if rule_of(eqn) is None:
            calls = calls_of(eqn)
            found.update(*map(unknown_primitives, calls.programs) if calls else [(eqn.primitive.name,)])
    return tuple(sorted(found))


def _dot(eqn) -> int:
    (lhs_contracting, _), _ = eqn.params["dimension_numbers"]
    return dot_flops(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, lhs_contracting)


def _ragged_dot(eqn) -> int:
    # Each row meets the matrix of its own group only.
    numbers = eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
    (lhs_contracting, _), _ = numbers
    return dot_flops(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, lhs_contracting)


def _scaled_matmul(eqn) -> int:
    return dot_flops(eqn.outvars[0].aval.shape, eqn.invars[0].aval.shape, (-1,))


def _convolution(eqn) -> int:
    lhs, rhs, out = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape, eqn.outvars[0].aval.shape
    numbers = eqn.params["dimension_numbers"]
    (batch, _, *lhs_spatial), (_, input_features, *rhs_spatial) = numbers.lhs_spec, numbers.rhs_spec
    _, output_features, *out_spatial = numbers.out_spec
    window = [
        WindowDimension(
            input=lhs[lhs_spatial[i]],
            kernel=rhs[rhs_spatial[i]],
            output=out[out_spatial[i]],
            stride=eqn.params["window_strides"][i],
            pad=eqn.params["padding"][i][0],
            lhs_dilation=eqn.params["lhs_dilation"][i],
            kernel_dilation=eqn.params["rhs_dilation"][i],
        )
        for i in range(len(lhs_spatial))
    ]
    return convolution_flops(
        batch=lhs[batch],
        kernel_input_features=rhs[input_features],
        output_features=out[output_features],
        window=window,
        batch_groups=eqn.params["batch_group_count"],
    )


def _kernel(eqn) -> float:
    """What a kernel's author states; else its body's products over its grid; else those of attention on its inputs."""
    stated = getattr(eqn.params.get("cost_estimate"), "flops", None)
    if stated:
        return float(stated)
    grid = getattr(eqn.params.get("grid_mapping"), "grid", ())
    body = sum(map(_products, called_jaxprs(eqn)))
    if body and all(isinstance(size, int) for size in grid):
        return body * math.prod(grid)
    arrays = [v.aval for v in eqn.invars if not isinstance(v, jex.Literal)]
    shapes = [shape for aval in arrays if len(shape := getattr(aval, "shape", ())) == 4]
    if len(shapes) >= 2:
        batch, queries, heads, width = shapes[0]
        return 4.0 * batch * queries * shapes[1][1] * heads * width
    return 2.0 * sum(math.prod(v.aval.shape) for v in eqn.outvars if hasattr(v.aval, "shape"))


def _products(jaxpr) -> float:
    """FLOPs of the products of a kernel's body. Its branches guard parts of the grid, not one another: all count."""
    total = 0.0
    for eqn in jaxpr.eqns:
        flops, calls = product_flops(eqn), calls_of(eqn)
        if calls and not flops:
            flops = calls.total([_products(program) for program in calls.programs], sum)
        total += flops or 0.0
    return total


def _names(rule: Rule, names: str) -> dict[str, Rule]:
    return dict.fromkeys(names.split(), rule)


_ELEMENTWISE, _PASS = Rule("elementwise"), Rule("pass")
# A call, since that refuses a name that stands twice.
_RULES = dict(
    dot_general=Rule("product", _dot),
    conv_general_dilated=Rule("product", _convolution),
    ragged_dot_general=Rule("product", _ragged_dot),
    scaled_matmul=Rule("product", _scaled_matmul),
    pallas_call=Rule("kernel", _kernel),
    reduce_scatter=Rule("pass", waits=True),
    **_names(
        Rule("elementwise", waits=True),
        """psum psum2 psum_invariant pmax pmin all_gather all_gather_invariant all_gather_reduced all_to_all
        ragged_all_to_all ppermute pshuffle psum_scatter unreduced_psum unreduced_reduce_scatter""",
    ),
    **_names(
        Rule("view"),
        """broadcast_in_dim reshape squeeze expand_dims convert_element_type slice split iota name copy copy_p
        stop_gradient tie_gradients unstack pvary pbroadcast transpose rev real imag""",
    ),
    **_names(
        _ELEMENTWISE,
        """abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e bitcast_convert_type cbrt
        ceil clamp clz complex concatenate conj cos cosh digamma div empty eq eq_to erf erf_inv erfc exp exp2 expm1
        floor ge gt igamma igammac integer_pow is_finite le le_to lgamma log log1p log2 logistic lt lt_to max min
        mul mulhi ne neg nextafter not one_minus_square or pad polygamma polynomial population_count pow
        reduce_precision regularized_incomplete_beta rem round rsqrt select_n stack shift_left shift_right_arithmetic
        shift_right_logical sign sin sinh sqrt square sub tan tanh xor zeros_like zeta
        random_clone random_fold_in random_seed random_split random_unwrap random_wrap rng_bit_generator rng_uniform
        threefry2x32 axis_index debug_callback debug_print device_put layout_constraint mesh_cast optimization_barrier
        reshard sharding_constraint tie tile""",
    ),
)
# By how a name begins, where it is not above; the names of scatters, sums and calls of libraries go on in many ways.
_FAMILIES = {
    **dict.fromkeys(("ffi_call", "dot_product_attention"), Rule("kernel", _kernel)),
    **_names(_PASS, "reduce_ arg cum sort scatter gather dynamic_ top_k fft random_bits"),
}
# Run again, these would wait for other devices again.
COLLECTIVES = frozenset(name for name, rule in _RULES.items() if rule.waits)
VIEWS = frozenset(name for name, rule in _RULES.items() if rule.kind == "view")
