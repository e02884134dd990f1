"""`Call`: a call of a function of pytrees, as one of flat arrays. `rewritten`: a function with another program."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import numpy as np

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


class Call:
    """A call of a function of pytrees, as a function of its flat arrays, `leaves`."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict[str, Any]):
        self._all, self._tree = jax.tree.flatten((args, kwargs))
        self._fn = fn
        # Python numbers and strings are the function's own business: it may branch on them.
        self._is_array = [isinstance(x, _ARRAYS) for x in self._all]
        self._fixed: list = []
        self._out_tree: Any = None
        self.leaves = self.arrays_of((args, kwargs))

    def arrays_of(self, tree) -> list:
        """The leaves of a tree like that of the arguments, where the arguments are arrays."""
        return [x for x, yes in zip(jax.tree.leaves(tree), self._is_array, strict=True) if yes]

    def __call__(self, *arrays) -> list:
        given = iter(arrays)
        leaves = [next(given) if yes else x for x, yes in zip(self._all, self._is_array, strict=True)]
        args, kwargs = jax.tree.unflatten(self._tree, leaves)
        outs, self._out_tree = jax.tree.flatten(self._fn(*args, **kwargs))
        self._fixed = [(not isinstance(x, _ARRAYS), x) for x in outs]
        return [x for (fixed, _), x in zip(self._fixed, outs, strict=True) if not fixed]

    def traced(self) -> jex.ClosedJaxpr:
        """The program of the call."""
        return jax.make_jaxpr(self)(*self.leaves)

    def result(self, outs: list) -> Any:
        """The outputs as the function returns them, with what is no array among them."""
        arrays = iter(outs)
        return self._out_tree.unflatten([x if fixed else next(arrays) for fixed, x in self._fixed])


def rewritten(fn: Callable, rewrite: Callable[[jex.ClosedJaxpr], Callable[..., list]]) -> Callable:
    """`fn` with other programs: `rewrite` gets that of each call, and returns a function of the same flat inputs.

    Args:
      fn: function of pytrees of arrays, whose outputs are arrays, or Python numbers that stay what they are.
      rewrite: as said.

    >>> rewritten(lambda x: {"y": x, "n": 3}, lambda program: lambda x: [2 * x])(jax.numpy.float32(4))
    {'n': 3, 'y': Array(8., dtype=float32)}
    """

    @functools.wraps(fn)
    def run(*args, **kwargs):
        call = Call(fn, args, kwargs)
        return call.result(rewrite(call.traced())(*call.leaves))

    return run
