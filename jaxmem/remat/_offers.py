"""What JAX offers a policy while a function is differentiated: the names that exist, and what the dots rules match."""

import collections
import difflib
from collections.abc import Iterable
from typing import Any

from jaxmem.errors import UnmatchedNamesError
from jaxmem.policy import FATES, Policy, as_policy, is_regex, matches
from jaxmem.remat._lower import JaxPolicy, is_dot, lower
from jaxmem.remat._wrap import CALL, Hooks, Options, wrap


class Offers:
    """A record of one dry trace. It is compared by identity, so nothing of an earlier trace comes from a cache.

    Pass `checkpoint` where `jaxmem.remat.checkpoint` would go, then differentiate:

    >>> import jax, jax.numpy as jnp
    >>> from jax.ad_checkpoint import checkpoint_name
    >>> offers = Offers()
    >>> block = offers.checkpoint(lambda x: jnp.sin(checkpoint_name(x @ x, "square")), "dots")
    >>> _ = jax.eval_shape(jax.grad(lambda x: block(x).sum()), jnp.ones((2, 2)))
    >>> sorted(offers.names), offers.dots, offers.blocks
    (['square'], 1, 1)
    """

    def __init__(self):
        self.blocks = 0  # how often a block was called
        self.names = collections.Counter()
        self.dots = 0  # operations that the dots rule kept

    def checkpoint(
        self, target: Any, policy: str | Policy, *, static_argnames=(), methods=CALL, scanned: bool = False
    ) -> Any:
        """`jaxmem.remat.checkpoint` that writes down what the policy is asked."""
        policy = as_policy(policy)
        if policy.keeps_everything:
            return target
        recording = Recording(lower(policy), self)
        return wrap(target, Options(recording, not scanned), static_argnames, methods, Hooks(before=self._count))

    def answer(self, policy: Policy) -> bool:
        """Whether every pattern and the dots rule of a policy found something."""
        named = all(any(matches(pattern, name) for name in self.names) for pattern in policy.patterns)
        return named and (policy.dots == "none" or self.dots > 0)

    def _count(self) -> None:
        self.blocks += 1


class Recording:
    """A JAX policy that answers as `policy` does; compared by identity."""

    def __init__(self, policy: JaxPolicy, offers: Offers):
        self.policy, self.offers = policy, offers

    def __call__(self, prim, *avals, **params) -> Any:
        if prim.name == "name":
            self.offers.names[params["name"]] += 1
        if is_dot(self.policy.policy, prim, *avals, **params):
            self.offers.dots += 1
        return self.policy(prim, *avals, **params)


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
