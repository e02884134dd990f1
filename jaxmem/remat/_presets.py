"""The remat presets by name."""

from collections.abc import Callable

import jax

from jaxmem.config import REMAT_PRESETS
from jaxmem.errors import UnknownPolicyError

# JAX's own policy functions: module-level, so equal by value and safe in a jit cache.
_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def policy(name: str) -> Callable:
    """The JAX policy of a preset other than "none"; UnknownPolicyError otherwise."""
    if name not in _POLICIES:
        raise UnknownPolicyError(
            wanted=f"a remat preset: {', '.join(REMAT_PRESETS)}",
            got=repr(name),
            do="Choose one of these presets.",
        )
    return _POLICIES[name]
