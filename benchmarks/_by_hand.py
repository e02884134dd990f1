"""Losses with `jax.checkpoint`, `nn.remat` or `nnx.remat` round each layer, as they are written without jaxmem.

Each is `(params, batch, rng, state) → (loss, what else the step returns)`: the new model state, and the loss's metrics.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

from jaxmem import Memory, WeightedMean

ByHand = Callable[[Any, Any, Any, Any], tuple[jax.Array, Any]]


def plain(loss: Callable[..., jax.Array]) -> ByHand:
    """Of a loss `(params, batch, rng)` without state."""
    return lambda params, batch, rng, state: (loss(params, batch, rng), None)


def rematted(target: Any, remat: Any = "full", *, scanned: bool = False) -> Any:
    """A linen class, or an nnx module, under Flax's own remat; what a `Memory` is given in place of jaxmem's.

    Within a scan nothing merges a recomputation with its original, so it needs no barrier.
    """
    if isinstance(target, nnx.Module):
        return lambda *args: nnx.remat(type(target).__call__)(target, *args)
    return nn.remat(target, prevent_cse=not scanned)


def _memory(dtype: Any) -> Memory:
    return Memory(remat="full", compute_dtype=jnp.dtype(dtype), checkpoint=rematted)


def linen(make: Callable[[Memory], nn.Module], loss: Callable, dtype: Any = jnp.bfloat16) -> ByHand:
    """Of a function `memory -> module` and the loss of an example, with its metrics."""
    module = make(_memory(dtype))

    def by_hand(params, batch, rng, state):
        run = nn.apply(lambda model, batch: _flat(loss(model, batch)), module, mutable=list(state))
        (value, metrics), new = run({"params": params, **state}, batch, rngs={"dropout": rng})
        return value, (new, metrics)

    return by_hand


def nnx_model(make: Callable[[Any], nnx.Module], loss: Callable) -> ByHand:
    """Of a function of a key that makes an nnx model, and a loss `(model, batch)`."""

    def by_hand(params, batch, rng, state):
        graph, _, _ = nnx.split(nnx.eval_shape(make, jax.random.key(0)), nnx.Param, ...)
        model = nnx.merge(graph, params, state, copy=True)
        value, metrics = _flat(loss(model, batch))
        return value, (nnx.split(model, nnx.Param, ...)[2], metrics)

    return by_hand


def with_memory(loss: Callable, dtype: Any = jnp.bfloat16) -> Callable:
    """A loss `(model, batch)` of one that takes the memory, too."""
    return lambda model, batch: loss(model, batch, memory=_memory(dtype))


def _flat(output: Any) -> tuple[jax.Array, dict]:
    """The loss and the metrics as plain arrays."""
    if not dataclasses.is_dataclass(output):
        return output, {}
    metrics = {name: _mean(value) for name, value in output.metrics.items()}
    return _mean(output.objective), metrics


def _mean(value: Any) -> jax.Array:
    return value.total / value.weight if isinstance(value, WeightedMean) else value
