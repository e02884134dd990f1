"""Flax modules as the fields of a `Workload`: a pure loss, parameters and state."""

import dataclasses
import functools
import inspect
import sys
from typing import Any, cast

import jax
import jax.numpy as jnp

from jaxmem._shown import name_of
from jaxmem._signatures import call_loss, check_loss, declares
from jaxmem.config import Memory
from jaxmem.errors import StateError, WorkloadError
from jaxmem.objective import LossOutput


def linen_fields(module, loss_fn, batch, rng_streams: tuple[str, ...]) -> dict:
    """`loss_fn`, `params` and `state` of a workload around a linen module."""
    from flax import linen as nn

    check_loss(loss_fn, "loss_fn(model, batch)", ("rng", "memory"))
    if isinstance(module, type) and issubclass(module, nn.Module) and _has_field(module, "memory"):
        module = functools.partial(_with_memory, module)
    is_module = isinstance(module, nn.Module)
    if not is_module and not _makes_modules(module):
        raise WorkloadError(
            wanted="a flax.linen module, or a function memory -> module",
            got=_described(module),
            do="Use Workload.from_nnx for it."
            if is_nnx(module)
            else "Instantiate the module, e.g. Workload.from_linen(MyModel(width=64), ...); one with a field `memory` "
            "is made by a function, lambda memory: MyModel(memory, width=64).",
        )

    def build(memory) -> nn.Module:
        return module if isinstance(module, nn.Module) else module(memory)

    def streams(key):
        return {name: key if i == 0 else jax.random.fold_in(key, i) for i, name in enumerate(rng_streams)}

    def init(key):
        example = jax.tree.map(_zeros_like, batch)
        params_key, loss_key = jax.random.split(key)

        def run(model, batch):
            return call_loss(loss_fn, model, batch, rng=loss_key, memory=Memory())

        return nn.init(run, build(Memory()))({"params": params_key, **streams(loss_key)}, example)

    def loss(params, batch, *, rng, state, memory):
        def run(model, batch):
            return call_loss(loss_fn, model, batch, rng=rng, memory=memory)

        apply = nn.apply(run, build(memory), mutable=list(state))
        output, updated = apply({"params": params, **state}, batch, rngs=streams(rng))
        _check_collections(updated, state)
        return with_state(output, {**state, **updated})

    return {
        "loss_fn": _declared(loss, loss_fn, uses_memory=not is_module or declares(loss_fn, "memory")),
        "params": lambda key: init(key).get("params", {}),
        "state": lambda key: {name: value for name, value in init(key).items() if name != "params"},
    }


def nnx_fields(model, loss_fn, wrt) -> dict:
    """`loss_fn`, `params` and `state` of a workload around an nnx model."""
    from flax import nnx

    check_loss(loss_fn, "loss_fn(model, batch)", ("rng", "memory"))
    wrt = nnx.Param if wrt is None else wrt

    def split(model):
        # What was sown for inspection is no state: it would make the state grow with every call.
        nnx.pop(model, nnx.Intermediate)
        return nnx.split(model, wrt, ...)

    if isinstance(model, nnx.Module):
        graph, params, state = split(nnx.merge(*nnx.split(model)))  # the caller's object keeps what it has sown
    elif _makes_modules(model):
        graph, _, _ = split(nnx.eval_shape(model, jax.random.key(0)))
        params = lambda key: split(model(key))[1]  # noqa: E731
        state = lambda key: split(model(key))[2]  # noqa: E731
    else:
        raise WorkloadError(
            wanted="a flax.nnx module, or a function key -> module",
            got=_described(model),
            do="Use Workload.from_linen for it."
            if is_a(type(model), "flax.linen", "Module")
            else "Instantiate the module, e.g. Workload.from_nnx(MyModel(rngs=nnx.Rngs(0)), ...).",
        )

    def loss(params, batch, *, rng, state, memory):
        # Without copies, BatchNorm and Dropout would write to variables of an outer trace (TraceContextError).
        model = nnx.merge(graph, params, state, copy=True)
        output = call_loss(loss_fn, model, batch, rng=rng, memory=memory)
        return with_state(output, split(model)[2])

    declared = _declared(loss, loss_fn, uses_memory=declares(loss_fn, "memory"))
    return {"loss_fn": declared, "params": params, "state": state}


def _has_field(cls: type, name: str) -> bool:
    return dataclasses.is_dataclass(cls) and any(field.name == name for field in dataclasses.fields(cls))


def _with_memory(cls: type, memory: Memory):
    return cls(memory=memory)


def _described(module: Any) -> str:
    return repr(module) if isinstance(module, type) else f"a {type(module).__module__}.{type(module).__qualname__}"


def is_a(cls, module: str, name: str) -> bool:
    """issubclass without importing flax: an instance of a module that was never imported cannot exist."""
    loaded = sys.modules.get(module)
    return loaded is not None and issubclass(cls, getattr(loaded, name))


def is_nnx_object(x: Any) -> bool:
    """Whether it is an nnx object with variables of its own, a pytree that is updated in place: a module, Rngs."""
    return is_a(type(x), "flax.nnx", "Pytree")


def is_nnx(x: Any) -> bool:
    """Whether it is an nnx object or a Variable."""
    return is_nnx_object(x) or is_a(type(x), "flax.nnx", "Variable")


def is_rng_state(x) -> bool:
    """Whether it is the key or the count of an nnx stream of random numbers."""
    return is_a(type(x), "flax.nnx", "RngState")


def _zeros_like(x):
    """Zeros as JAX would hold `x`: NumPy's int64 is int32 there, which `jnp.zeros` would warn of. A scalar stays."""
    if not hasattr(x, "shape"):
        return x
    dtype = cast(Any, jax.dtypes.canonicalize_dtype(x.dtype, allow_extended_dtype=True))
    return jnp.zeros(x.shape, dtype)


def _makes_modules(fn) -> bool:
    """Whether it is a function of one argument, and not a module, of either kind, or a class of modules."""
    from flax import linen, nnx

    if not callable(fn) or isinstance(fn, (type, linen.Module, nnx.Module)):
        return False
    try:
        inspect.signature(fn).bind(Memory())
    except TypeError:
        return False
    except ValueError:  # one that does not tell
        return True
    return True


def _check_collections(updated, state) -> None:
    """StateError naming a linen collection that has grown or shrunk in one call."""
    for name, value in updated.items():
        if jax.tree.structure(value) != jax.tree.structure(state[name]):
            raise StateError(
                wanted=f"the linen collection {name!r} to keep its structure from call to call",
                got=f"{jax.tree.structure(value)} after {jax.tree.structure(state[name])}",
                do="sow() appends at every call: give it a reduce_fn and an init_fn, or sow into 'intermediates', "
                "which is not kept.",
            )


def _declared(loss, of, *, uses_memory: bool):
    """The loss under the name of the user's; it declares `memory` only if the model or the user's loss asks for it."""

    def loss_without_memory(params, batch, *, rng, state):
        return loss(params, batch, rng=rng, state=state, memory=Memory())

    declared = loss if uses_memory else loss_without_memory
    declared.__name__ = declared.__qualname__ = name_of(of)  # `functools.wraps` would show the signature of `of`, too
    return declared


def with_state(output, state) -> LossOutput:
    """What the loss of a Flax model returned, with the state that is tracked for it."""
    if not isinstance(output, LossOutput):
        return LossOutput(output, state=state)
    if output.state is not None:
        raise WorkloadError(
            wanted="LossOutput(objective, metrics) from the loss of a Flax model, whose state is tracked for it",
            got="a LossOutput with state",
            do="Keep the state in the module's own variables.",
        )
    return dataclasses.replace(output, state=state)
