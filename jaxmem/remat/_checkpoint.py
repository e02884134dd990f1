"""`checkpoint`: one block – a function, a linen or nnx module – under a remat policy."""

import functools
import inspect
from typing import Any

from jaxmem._blame import warn
from jaxmem.errors import RematWarning
from jaxmem.policy import Policy, as_policy
from jaxmem.remat._lower import JaxPolicy, lower
from jaxmem.remat._queries import Watch
from jaxmem.remat._wrap import CALL, Hooks, Options, wrap


def checkpoint(
    target: Any,
    policy: str | Policy,
    *,
    static_argnames: tuple[str, ...] = (),
    methods: tuple[str, ...] = CALL,
    scanned: bool = False,
) -> Any:
    """`target` with its intermediate values recomputed in the backward pass, as `policy` says.

    Array arguments are traced; everything else (`train=True`, strings, None, Python numbers) keeps its
    Python value, by position, by keyword or by default, so nothing has to be declared static. An nnx object
    among the arguments, also in a list or a dataclass, is updated once, as by `nnx.remat`; a linen module given
    to a linen block, or as the first argument of a function, has its parameters where `nn.remat` has them.

    Args:
      target: a function; a `flax.linen` module class, whose parameter paths stay as they are; a
        `flax.nnx` module class, instance or bound method.
      policy: a preset's name ("none", "full", "dots", "dots_no_batch", "minimal", ...) or a `Policy`.
      static_argnames: array arguments to be passed by value all the same.
      methods: of a module class, the methods that are blocks, each call one. Others that are called from
        outside, such as `encode` in `block.encode(x)`, are not recomputed, as with `nn.remat`.
      scanned: the block is the body of a `lax.scan`. Then the barrier that keeps XLA's
        common-subexpression elimination from undoing the recomputation is not needed, and is left out.

    Returns:
      The same kind of thing as `target`, except for an nnx instance, which becomes a callable.

    Raises:
      UnknownPolicyError: for another name; InputError: for a target that is not a block; when called, for one that
      closes over a Flax module, rather than being given it, and changes its variables;
      PolicyNotHonoured: where JAX or the device would ignore part of the policy;
      UnmatchedNamesError: when a gradient is taken for which neither this nor another block with the same
      policy offered a name of the policy, or a match of a regular expression.

    >>> import jax, jax.numpy as jnp
    >>> block = checkpoint(lambda x, *, train: jnp.sin(jnp.sin(x)) if train else x, "full")
    >>> float(jax.grad(lambda x: block(x, train=True))(0.0))
    1.0

    Source: `jax.checkpoint`; Chen et al. 2016, "Training deep nets with sublinear memory cost".
    """
    policy = as_policy(policy)
    return _apply(target, policy, static_argnames, methods, scanned, watched=True)


def checkpoint_unchecked(
    target: Any, policy: str | Policy, *, static_argnames=(), methods=CALL, scanned: bool = False
) -> Any:
    """`checkpoint` for whoever checks names on the whole loss, where each may be in another block."""
    return _apply(target, as_policy(policy), static_argnames, methods, scanned, watched=False)


def _apply(target, policy: Policy, static_argnames, methods, scanned: bool, watched: bool):
    if policy.keeps_everything:
        if policy.save or policy.dots != "none":
            warn(
                f"The remat policy ({policy}) keeps everything, so it is none: rest='save' already saves what save and "
                "dots name. Leave rest out to recompute what is not named.",
                RematWarning,
            )
        return target  # not everything_saveable, under which XLA keeps more than without a checkpoint
    asked = lower(policy)
    if not (watched and policy.patterns):
        return wrap(target, Options(asked, not scanned), static_argnames, methods)
    watch = _watch_of_class(target, asked) if inspect.isclass(target) else Watch(asked)
    return wrap(target, Options(watch, not scanned), static_argnames, methods, Hooks(results=watch.results))


@functools.lru_cache(maxsize=1024)  # as many as there are wrapped classes
def _watch_of_class(cls, policy: JaxPolicy) -> Watch:
    return Watch(policy)
