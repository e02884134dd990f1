"""`tie`: values as they are, whose gradients leave together. Nothing else in a program says when a gradient is made.

A compiler may pass the gradient of the activations on first, and make those of the weights late. Then what they need,
such as recomputed activations, waits with them. Behind one barrier none is passed on before all are made.

The tie is a primitive and no custom rule, so that forward mode works, and so that an input without a gradient gets none
by it: the tangents pass through the primitive, and only those that are not zero.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
from jax import lax
from jax.interpreters import ad, batching, mlir

from jaxmem._compat import prune_by_place, varying_axes
from jaxmem.jaxprs._equations import TIE, is_float


def tie(values: Sequence, at: str) -> list:
    """The values; gradients of the floating ones are passed on when all of them are made.

    Args:
      values: arrays of any shapes and dtypes.
      at: what reads them, for who reads the program.

    >>> import jax.numpy as jnp
    >>> step = jax.grad(lambda w, x: (lambda w, x: w * x)(*tie([w, x], "product")), argnums=(0, 1))
    >>> print(jax.make_jaxpr(step)(2.0, 3.0).eqns[-1].primitive, *step(2.0, 3.0))
    optimization_barrier 3.0 2.0
    """
    return _of_some(lambda some: _tie.bind(*some, at=at), values, lambda value: is_float(jax.typeof(value)))


def together(tree: Any) -> Any:
    """The values behind a barrier, one for each set of mesh axes that values vary over.

    In JAX 0.10 the outputs of a barrier vary over the axes of all its inputs.
    """
    values, structure = jax.tree.flatten(tree)
    alike = collections.defaultdict(list)
    for i, value in enumerate(values):
        alike[varying_axes(value)].append(i)
    for indices in alike.values():
        for i, value in zip(indices, lax.optimization_barrier([values[i] for i in indices]), strict=True):
            values[i] = value
    return structure.unflatten(values)


def _of_some(through: Callable[[list], Sequence], values: Sequence, chosen: Callable[[Any], bool]) -> list:
    """The values, with `through` applied to the chosen ones together."""
    out = list(values)
    indices = [i for i, value in enumerate(out) if chosen(value)]
    if len(indices) > 1:  # a gradient alone waits for nothing
        for i, value in zip(indices, through([out[i] for i in indices]), strict=True):
            out[i] = value
    return out


def _not_zero(value) -> bool:
    return not isinstance(value, ad.Zero)


def _jvp(primals, tangents, *, at: str):
    return list(primals), _of_some(lambda some: _tie.bind(*some, at=at), tangents, _not_zero)


def _transpose(cotangents, *operands, at: str):
    # In the order in which they are made, the last reader's first. All that is known of it: the other way round, one
    # model, an MLP, took a third longer on one chip (v5e, libtpu 0.0.52, by its compiler's cycles).
    out = _of_some(lambda some: together(some[::-1])[::-1], cotangents, _not_zero)
    return [c if ad.is_undefined_primal(x) else None for c, x in zip(out, operands, strict=True)]


_tie = jex.Primitive(TIE)
_tie.multiple_results = True
_tie.def_impl(lambda *values, at: list(values))
_tie.def_abstract_eval(lambda *avals, at: list(avals))
ad.primitive_jvps[_tie] = _jvp
ad.primitive_transposes[_tie] = _transpose
batching.primitive_batchers[_tie] = lambda values, dims, *, at: (_tie.bind(*values, at=at), dims)
mlir.register_lowering(_tie, lambda context, *values, at: list(values))
prune_by_place(_tie)
