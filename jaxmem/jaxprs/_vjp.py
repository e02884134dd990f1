"""What is differentiated, and `vjp_residuals`: the values that this keeps, as variables of one traced program."""

from collections.abc import Callable, Sequence

import jax
import jax.extend.core as jex

from jaxmem._cell import shortening
from jaxmem.jaxprs._equations import is_value
from jaxmem.targets import in_mesh, mesh_of


def vjp_residuals(fn: Callable, *args, argnums: int | None = None) -> tuple[jex.Jaxpr, tuple[jex.Var, ...]]:
    """The jaxpr of `jax.vjp(fn, *args)`'s forward pass, and those of its variables that are kept.

    Arguments and constants are not among them, since they are there anyway. Duplicates count once.

    Args:
      fn: function of floating-point pytrees with any pytree output.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      argnums: the argument that is differentiated; None for all of them.
    """

    def kept(*args):
        if argnums is None:
            return jax.tree.leaves(jax.vjp(fn, *args)[1])  # a vjp function is a pytree of its residuals
        before, after = args[:argnums], args[argnums + 1 :]
        return jax.tree.leaves(jax.vjp(lambda arg: fn(*before, arg, *after), args[argnums])[1])

    with in_mesh(mesh_of(mixed=True, arguments=args), args), shortening(all=True):
        jaxpr = jax.make_jaxpr(kept)(*args).jaxpr
    given = {*jaxpr.invars, *jaxpr.constvars}
    return jaxpr, tuple(dict.fromkeys(v for v in jaxpr.outvars if is_value(v) and v not in given))


def of_some(fn: Callable, args: Sequence, some: Sequence[bool]) -> tuple[Callable, list, list]:
    """`fn` of two lists, the arguments for which `some` is true and the others, and these lists.

    >>> of, first, rest = of_some(lambda a, b, c: a + b * c, [1, 2, 3], [False, True, False])
    >>> first, rest, of(first, rest)
    ([2], [1, 3], 7)
    """

    def of(first, rest):
        first, rest = iter(first), iter(rest)
        return fn(*[next(first) if yes else next(rest) for yes in some])

    pairs = list(zip(args, some, strict=True))
    return of, [arg for arg, yes in pairs if yes], [arg for arg, yes in pairs if not yes]
