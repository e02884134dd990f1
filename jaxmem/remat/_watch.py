"""Which names JAX offered a policy, looked at when a block is differentiated backward: nothing of it is left to run.

When a block is called nobody knows whether it will be differentiated, nor what the other blocks with its policy have.
When its gradient is pulled back, all blocks of the loss were differentiated forward, so their policies were asked. So a
block's results pass through a primitive that is the identity, and whose transpose looks at what was offered.
"""

import weakref
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax.interpreters import ad, batching, mlir

from jaxmem.remat._arguments import is_nnx
from jaxmem.remat._lower import JaxPolicy
from jaxmem.remat._offers import check_names
from jaxmem.remat._wrap import WATCH


class Watch:
    """A JAX policy that answers as `policy` does and writes down the names it was asked about.

    Compared by identity, so that JAX asks anew for each watch, whatever its caches hold of an equal policy. What was
    offered to any watch of an equal policy that is still in use counts: blocks share the names of their policy.
    """

    def __init__(self, policy: JaxPolicy):
        self.policy, self.asked = policy, False
        self.names: set[str] = set()
        _WATCHES.add(self)

    def __call__(self, prim, *avals, **params) -> Any:
        self.asked = True
        if prim.name == "name":
            self.names.add(params["name"])
        return self.policy(prim, *avals, **params)

    def results(self, out: Any) -> Any:
        """A block's results, as they are."""
        # An nnx object stays the object that it is: as a pytree it would be copied.
        watch = lambda leaf: _watched.bind(leaf, watch=self) if _is_float(leaf) else leaf  # noqa: E731
        return jax.tree.map(watch, out, is_leaf=is_nnx)

    def check(self) -> None:
        """UnmatchedNamesError for a pattern of the policy that matched nothing.

        A block that is transposed without having been differentiated, since it is linear, was not asked about.
        """
        if self.asked:
            equal = [watch for watch in _WATCHES if watch.policy == self.policy]
            offered = set().union(*(watch.names for watch in equal))
            check_names(self.policy.policy, offered, where="a block with this policy")


_WATCHES: "weakref.WeakSet[Watch]" = weakref.WeakSet()


def _is_float(leaf) -> bool:
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.inexact)


def _transpose(cotangent, operand, *, watch: Watch):
    watch.check()
    return [cotangent]


_watched = jex.Primitive(WATCH)
_watched.def_impl(lambda leaf, *, watch: leaf)
_watched.def_abstract_eval(lambda aval, *, watch: aval)
ad.deflinear2(_watched, _transpose)
batching.defvectorized(_watched)
mlir.register_lowering(_watched, lambda context, leaf, *, watch: [leaf])
