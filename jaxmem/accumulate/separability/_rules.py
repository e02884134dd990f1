"""The table of rules: what each primitive does to the rows of a batch. A primitive that is not here is not known.

`rule(eqn, twin, values)` gets the equation, its twin in the program of fewer rows, and the values of its inputs, of
which none is mixed or unknown. It returns one value for all outputs, or a list.
"""

from jaxmem.accumulate.separability import _reduction_rules as over
from jaxmem.accumulate.separability import _shape_rules as each

_TABLE = {
    # elementwise
    "convert_element_type copy copy_p name neg optimization_barrier pcast pvary": each.unchanged,
    "reduce_precision stop_gradient real imag conj": each.unchanged,
    "abs acos acosh add add_any and asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil": each.elementwise,
    "clamp complex cos cosh digamma div eq erf erf_inv erfc exp exp2 expm1 floor ge gt": each.elementwise,
    "integer_pow is_finite le lgamma log log1p logistic lt max min mul ne nextafter not": each.elementwise,
    "one_minus_square or population_count pow rem round rsqrt select_n shift_left": each.elementwise,
    "shift_right_arithmetic shift_right_logical sign sin sinh sqrt square sub tan tanh xor": each.elementwise,
    # shapes
    "iota": each.iota,
    "broadcast_in_dim": each.broadcast_in_dim,
    "reshape": each.reshape,
    "squeeze": each.squeeze,
    "unstack": each.unstack,
    "stack": each.stack,
    "transpose": each.transpose,
    "rev": each.rev,
    "split slice dynamic_slice": each.slice_,
    "pad": each.pad,
    "concatenate": each.concatenate,
    "dynamic_update_slice": each.dynamic_update_slice,
    # reductions and windows
    "reduce_sum reduce_max reduce_min reduce_prod reduce_and reduce_or argmax argmin": over.reduction,
    "cumsum cumprod cummax cummin cumlogsumexp sort top_k": over.along_axis,
    "reduce_window_sum reduce_window_max reduce_window_min": over.window,
    "select_and_scatter_add select_and_gather_add": over.window,
    "fft": over.fft,
    # products and look-ups
    "dot_general": over.dot_general,
    "conv_general_dilated": over.conv_general_dilated,
    "gather": over.gather,
    "scatter scatter-add": over.scatter,
}
RULES = {name: rule for names, rule in _TABLE.items() for name in names.split()}
