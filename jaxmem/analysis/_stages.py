"""What jits functions, and what the stages of jitted ones are: JAX's own, and flax's wrappers round them."""

import inspect
from collections.abc import Callable
from typing import Any

import jax

_STAGES = {"traced": jax.stages.Traced, "lowered": jax.stages.Lowered, "compiled": jax.stages.Compiled}


def jax_stage(stage: Any) -> Any:
    """A stage of JAX itself: what `nnx.jit(f).trace(...)`, `.lower(...)` or `.compile()` is a wrapper of."""
    for name, cls in _STAGES.items():
        if isinstance(inner := getattr(stage, name, None), cls):
            return inner
    return stage


def jit_of(jitted: Any) -> str:
    """What made a jitted function or a stage of one, "jax.jit" or "nnx.jit"."""
    return "nnx.jit" if type(jitted).__module__.startswith("flax.nnx") else "jax.jit"


def parameters_of(fn: Callable) -> tuple[str, ...]:
    """Names of a function's parameters; empty where its signature is not told."""
    try:
        return tuple(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return ()
