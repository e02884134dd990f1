"""`checkpoint`: one block – a function, a linen or nnx module – under a remat policy."""

import warnings
from typing import Any

from jaxmem.errors import RematWarning
from jaxmem.policy import Policy, as_policy
from jaxmem.remat._lower import lower
from jaxmem.remat._offers import CheckBlock
from jaxmem.remat._wrap import Options, wrap


def checkpoint(
    target: Any, policy: str | Policy, *, static_argnames: tuple[str, ...] = (), scanned: bool = False
) -> Any:
    """`target` with its intermediate values recomputed in the backward pass, as `policy` says.

    Array arguments are traced; everything else (`train=True`, strings, None, Python numbers) keeps its
    Python value, by position, by keyword or by default, so nothing has to be declared static.

    Args:
      target: a function; a `flax.linen` module class, whose parameter paths stay as they are; a
        `flax.nnx` module class, instance or bound method.
      policy: a preset's name ("none", "full", "dots", "dots_no_batch", "minimal", ...) or a `Policy`.
      static_argnames: array arguments to be passed by value all the same.
      scanned: the block is the body of a `lax.scan`. Then the barrier that keeps XLA's
        common-subexpression elimination from undoing the recomputation is not needed, and is left out.

    Returns:
      The same kind of thing as `target`, except for an nnx instance, which becomes a callable.

    Raises:
      UnknownPolicyError: for another name; InputError: for a target that is not a block;
      PolicyNotHonoured: where JAX or the device would ignore part of the policy;
      UnmatchedNamesError: when a function is called that does not offer the policy's names. A module is
      checked by `make_train_step`, `compare` and `examine`, which differentiate the whole loss.

    >>> import jax, jax.numpy as jnp
    >>> block = checkpoint(lambda x, *, train: jnp.sin(jnp.sin(x)) if train else x, "full")
    >>> float(jax.grad(lambda x: block(x, train=True))(0.0))
    1.0

    Source: `jax.checkpoint`; Chen et al. 2016, "Training deep nets with sublinear memory cost".
    """
    policy = as_policy(policy)
    return _apply(target, policy, static_argnames, scanned, CheckBlock(policy) if policy.patterns else None)


def checkpoint_unchecked(target: Any, policy: str | Policy, *, static_argnames=(), scanned: bool = False) -> Any:
    """`checkpoint` for whoever checks names on the whole loss, where each may be in another block."""
    return _apply(target, as_policy(policy), static_argnames, scanned, None)


def _apply(target, policy: Policy, static_argnames, scanned: bool, on_call):
    if policy.keeps_everything:
        if policy.save or policy.dots != "none":
            warnings.warn(
                f"The remat policy ({policy}) keeps everything, so it is none: rest='save' already saves what save and "
                "dots name. Leave rest out to recompute what is not named.",
                RematWarning,
                stacklevel=3,
            )
        return target  # not everything_saveable, under which XLA keeps more than without a checkpoint
    return wrap(target, Options(lower(policy), not scanned), static_argnames, on_call)
