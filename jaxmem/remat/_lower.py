"""`lower`: a `Policy` as the callable that JAX asks, refused where JAX or the device would ignore it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import Offloadable, checkpoint_name

from jaxmem.errors import PolicyNotHonoured
from jaxmem.jaxprs import is_on_host, vjp_residuals
from jaxmem.policy import Policy

# The only memory kind that JAX offloads to: it takes any other name without a word, and leaves the value where it is.
HOST = "pinned_host"
_DOTS = {
    "no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "all": jax.checkpoint_policies.dots_saveable,
}


@dataclasses.dataclass(frozen=True)
class JaxPolicy:
    """The policy as `jax.checkpoint` takes it: equal by value, so that JAX's caches hold."""

    policy: Policy

    def __call__(self, prim, *avals, **params) -> Any:
        """True, False or `Offloadable` for one operation's outputs; asked for each one of a block's forward pass."""
        policy = self.policy
        if prim.name == "name":  # what checkpoint_name leaves in the program
            fate = policy.fate(params["name"])
            if fate == "offload":
                return Offloadable(src="device", dst=HOST)
            if fate is not None:
                return fate == "save"
        if is_dot(policy, prim, *avals, **params):
            return True
        return policy.rest == "save"


def is_dot(policy: Policy, prim, *avals, **params) -> bool:
    """Whether the dots rule of a policy keeps an operation."""
    return policy.dots != "none" and bool(_DOTS[policy.dots](prim, *avals, **params))


def lower(policy: Policy) -> JaxPolicy:
    """The JAX policy of one that does not keep everything.

    Raises:
      PolicyNotHonoured: the installed JAX, as it is configured, would ignore part of it; or the device
        has no memory of the kind that values are to be offloaded to.
    """
    features = {
        "save by name": bool(policy.save),
        "offload by name": bool(policy.offload),
        "dots": policy.dots != "none",
        'rest="save"': policy.rest == "save",
    }
    for feature, used in features.items():
        if used and not _honoured(feature, _rewrite_enabled()):
            raise PolicyNotHonoured(
                wanted=f"a remat policy that jax {jax.__version__} honours, where jax_remat3={_rewrite_enabled()}",
                got=f"{policy}, of which it ignores: {feature}",
                do="Leave jax_remat3 at False, or use remat='full'.",
            )
    if policy.offload:
        _check_host_memory()
    return JaxPolicy(policy)


def _rewrite_enabled() -> bool:
    """Whether JAX's rewrite of remat is switched on: its policies are asked about less (0.12), or nothing (0.10)."""
    return bool(getattr(jax.config, "jax_remat3", False))


@functools.cache
def _honoured(feature: str, rewrite: bool) -> bool:
    """Tries one feature on one small block. What a version of JAX asks its policies changes without notice."""
    del rewrite  # part of the key
    policy, block = _PROBES[feature]
    block = jax.checkpoint(block, policy=JaxPolicy(policy))
    _, kept = vjp_residuals(block, jax.ShapeDtypeStruct((2, 2), jnp.float32))
    return any(is_on_host(v.aval) for v in kept) if policy.offload else bool(kept)


_PROBES = {
    "save by name": (Policy(save=("x",)), lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "x"))),
    "offload by name": (Policy(offload=("x",)), lambda x: jnp.sin(checkpoint_name(jnp.sin(x), "x"))),
    "dots": (Policy(dots="all"), lambda x: jnp.sin(x @ x)),
    'rest="save"': (Policy(rest="save"), lambda x: jnp.sin(jnp.sin(x))),
}


def _check_host_memory() -> None:
    device: Any = getattr(jax.config, "jax_default_device", None) or jax.local_devices()[0]
    if isinstance(device, str):
        device = jax.local_devices(backend=device)[0]
    kinds = sorted({memory.kind for memory in device.addressable_memories()})
    if HOST not in kinds:
        raise PolicyNotHonoured(
            wanted=f"a device with {HOST} memory to offload to",
            got=f"{device.device_kind}, which has {', '.join(kinds)}",
            do="Save or recompute on this device instead of offloading.",
        )
