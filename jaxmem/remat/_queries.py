"""Policy queries: what JAX asks a policy while a block is differentiated, and the names that a policy must find.

Two things ask for them. A dry trace of a whole loss is recorded by `PolicyQueries`. A block by itself is watched, by a
`Watch`: when it is called nobody knows whether it will be differentiated, nor what the other blocks with its policy
have. When its gradient is pulled back, all blocks of the loss were differentiated forward, so their policies were
asked. So a block's results pass through a primitive that is the identity, and whose transpose checks the names.
"""

import difflib
import weakref
from collections.abc import Iterable
from typing import Any

import jax
import jax.extend.core as jex
from jax.interpreters import ad, batching, mlir

from jaxmem._flax import is_nnx
from jaxmem.errors import UnmatchedNamesError
from jaxmem.jaxprs import WATCH, is_float
from jaxmem.policy import FATES, Policy, as_policy, is_regex, matches
from jaxmem.remat._lower import JaxPolicy, is_dot, lower
from jaxmem.remat._wrap import CALL, Hooks, Options, wrap


class PolicyQueries:
    """What the policies of one dry trace were asked.

    Pass `checkpoint` where `jaxmem.remat.checkpoint` would go, then differentiate:

    >>> import jax, jax.numpy as jnp
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> queries = PolicyQueries()
    >>> block = queries.checkpoint(lambda x: jnp.sin(checkpoint_name(x @ x, "square")), "dots")
    >>> _ = jax.eval_shape(jax.grad(lambda x: block(x).sum()), jnp.ones((2, 2)))
    >>> sorted(queries.names), queries.dots, queries.blocks
    (['square'], 1, 1)
    """

    def __init__(self):
        self.blocks = 0  # how often a block was called
        self.asked = False
        self.names: set[str] = set()
        self.dots = 0  # operations that the dots rule kept

    def checkpoint(
        self, target: Any, policy: str | Policy, *, static_argnames=(), methods=CALL, scanned: bool = False
    ) -> Any:
        """`jaxmem.remat.checkpoint` that records what the policy is asked."""
        policy = as_policy(policy)
        if policy.keeps_everything:
            return target
        recording = RecordedPolicy(lower(policy), self)
        return wrap(target, Options(recording, not scanned), static_argnames, methods, Hooks(before=self._count))

    def answer(self, policy: Policy) -> bool:
        """Whether every pattern and the dots rule of a policy found something."""
        named = all(any(matches(pattern, name) for name in self.names) for pattern in policy.patterns)
        return named and (policy.dots == "none" or self.dots > 0)

    def _count(self) -> None:
        self.blocks += 1


class RecordedPolicy:
    """A JAX policy that answers as `policy` does and records what it is asked.

    Compared by identity, so that JAX asks each one anew, whatever its caches hold of an equal policy.
    """

    def __init__(self, policy: JaxPolicy, queries: PolicyQueries):
        self.policy, self.queries = policy, queries

    def __call__(self, prim, *avals, **params) -> Any:
        self.queries.asked = True
        if prim.name == "name":
            self.queries.names.add(params["name"])
        if is_dot(self.policy.policy, prim, *avals, **params):
            self.queries.dots += 1
        return self.policy(prim, *avals, **params)


class Watch(RecordedPolicy):
    """The recorded policy of a block that checks its names by itself.

    What any watch of an equal policy was offered counts while that watch is in use: blocks share the names of their
    policy.
    """

    def __init__(self, policy: JaxPolicy):
        super().__init__(policy, PolicyQueries())
        _WATCHES.add(self)

    def results(self, out: Any) -> Any:
        """A block's results, as they are."""
        return watched(out, self)

    def check(self) -> None:
        """UnmatchedNamesError for a pattern of the policy that matched nothing.

        A linear block may be transposed without having been differentiated, so that its policy was not asked.
        """
        if self.queries.asked:
            equal = [watch for watch in _WATCHES if watch.policy == self.policy]
            offered = set().union(*(watch.queries.names for watch in equal))
            check_names(self.policy.policy, offered, where="a block with this policy")


_WATCHES: "weakref.WeakSet[Watch]" = weakref.WeakSet()


def watched(out: Any, watch: Any) -> Any:
    """Results as they are; `watch.check()` is called when their gradients are pulled back."""

    def bind(leaf):
        return _watched.bind(leaf, watch=watch) if isinstance(leaf, jax.Array) and is_float(leaf) else leaf

    # An nnx object stays the object that it is: as a pytree it would be copied.
    return jax.tree.map(bind, out, is_leaf=is_nnx)


def _transpose(cotangent, operand, *, watch: Any):
    watch.check()
    return [cotangent]


_watched = jex.Primitive(WATCH)
_watched.def_impl(lambda leaf, *, watch: leaf)
_watched.def_abstract_eval(lambda aval, *, watch: aval)
ad.deflinear2(_watched, _transpose)
batching.defvectorized(_watched)
mlir.register_lowering(_watched, lambda context, leaf, *, watch: [leaf])


def check_names(policy: Policy, offered: Iterable[str], *, where: str, in_program: Iterable[str] = ()) -> None:
    """UnmatchedNamesError for an exact name that was not offered, or a regular expression that matched nothing.

    Args:
      policy: of the loss or block.
      offered: the names it was asked about.
      where: what was differentiated, for the message.
      in_program: names that the program has, offered or not.
    """
    offered = sorted(set(offered))
    missing = [p for p in policy.patterns if not any(matches(p, name) for name in offered)]
    if not missing:
        return
    fields = ", ".join(f"{field}={p!r}" for field in FATES for p in getattr(policy, field) if p in missing)
    got = f"the names {', '.join(offered)}" if offered else "no names at all"
    exact = [p for p in missing if not is_regex(p)]
    hidden = [name for name in set(in_program) - set(offered) if any(matches(p, name) for p in missing)]
    close = [near[0] for p in exact if (near := difflib.get_close_matches(p, offered, n=1))]
    if hidden:
        do = (
            f"{', '.join(sorted(hidden))} is in the program, but outside every block, or in the primal of a custom_vjp "
            "or custom_jvp, which differentiation never runs: name the value inside a block, or in the forward rule."
        )
    elif close:
        do = f"Did you mean {' and '.join(close)}?"
    else:
        do = 'Name the value in the block with jax.ad_checkpoint.checkpoint_name(x, "name"), or correct the policy.'
    raise UnmatchedNamesError(
        wanted=f"{fields} to match a value that {where} offers while it is differentiated", got=got, do=do
    )
