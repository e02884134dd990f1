"""`wrap`: a function, a linen or nnx module as one block of `jax.checkpoint`."""

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxmem._compat import prevents_cse
from jaxmem.errors import InputError

WATCH = "watch_names"  # the primitive through which the results of a watched block pass; see _watch.py


class Options(NamedTuple):
    """Keyword arguments of jax.checkpoint, nn.remat and nnx.remat."""

    policy: Callable
    prevent_cse: bool


class Hooks(NamedTuple):
    """What else happens at each call of a block; equal by value, like options.

    Args:
      before: called with nothing.
      results: called with the block's results, which it returns.
    """

    before: Callable[[], None] = lambda: None
    results: Callable[[Any], Any] = lambda out: out


NO_HOOKS = Hooks()


def wrap(target: Any, options: Options, static_argnames=(), hooks: Hooks = NO_HOOKS) -> Any:
    """`target` under `jax.checkpoint`; see `jaxmem.remat.checkpoint`.

    Args:
      target: the block.
      options: for `jax.checkpoint`.
      static_argnames: array arguments to be passed by value.
      hooks: around each call.
    """
    names = frozenset((static_argnames,) if isinstance(static_argnames, str) else static_argnames)
    if inspect.isclass(target) and _is_a(target, "flax.linen", "Module"):
        return _linen_class(target, names, options, hooks)
    if inspect.isclass(target) and _is_a(target, "flax.nnx", "Module"):
        return _nnx_class(target, names, options, hooks)
    if not inspect.isclass(target) and _is_a(type(target), "flax.nnx", "Module"):
        return _nnx_call(type(target).__call__, target, names, options, hooks)
    owner = getattr(target, "__self__", None)
    if owner is not None and _is_a(type(owner), "flax.nnx", "Module"):
        # The very function: by its name, super().method would be the override that calls it.
        method = getattr(target, "__func__", None) or getattr(type(owner), target.__name__)
        return _nnx_call(method, owner, names, options, hooks)
    for kind in (type(target), type(owner)):
        if _is_a(kind, "flax.linen", "Module"):
            raise InputError(
                wanted="a linen module class as a block",
                got=f"an instance of {kind.__name__}",
                do=f"Wrap the class before it is instantiated: memory.block({kind.__name__})(...)(x).",
            )
    if inspect.isclass(target) or not callable(target):
        raise InputError(
            wanted="a function, a linen or nnx module class, an nnx module or a bound nnx method",
            got=f"{target!r}",
            do="Wrap the function that computes the block.",
        )

    @functools.wraps(target)
    def block(*args, **kwargs):
        arrays, rebuild = _partition(target, args, kwargs, names)

        def call(arrays):
            args, kwargs = rebuild(arrays)
            return target(*args, **kwargs)

        hooks.before()
        call.__name__ = getattr(target, "__name__", type(target).__name__)
        return hooks.results(jax.checkpoint(call, **options._asdict())(arrays))

    return block


@functools.lru_cache(maxsize=1024)  # one class per block and policy: module classes are compared by identity
def _linen_class(cls, names, options, hooks):
    from flax import linen as nn

    def __call__(self, *args, **kwargs):
        arrays, rebuild = _partition(functools.partial(cls.__call__, self), args, kwargs, names)

        def call(module, arrays):
            args, kwargs = rebuild(arrays)
            return cls.__call__(module, *args, **kwargs)

        hooks.before()
        return hooks.results(nn.remat(call, **options._asdict())(self, arrays))

    # The class keeps its name: linen builds parameter paths from it ("Block_0"), and saved parameters stay valid.
    return type(cls)(cls.__name__, (cls,), _like(cls, __call__))


@functools.lru_cache(maxsize=1024)
def _nnx_class(cls, names, options, hooks):
    def __call__(self, *args, **kwargs):
        return _nnx_call(cls.__call__, self, names, options, hooks)(*args, **kwargs)

    return type(cls)(cls.__name__, (cls,), _like(cls, __call__))


def _nnx_call(method: Callable, module, names, options, hooks) -> Callable:
    """nnx.remat splits the module into arrays and back, so that BatchNorm and RNG counts are updated once."""
    from flax import nnx

    @functools.wraps(method)
    def block(*args, **kwargs):
        arrays, rebuild = _partition(functools.partial(method, module), args, kwargs, names)

        def call(module, arrays):
            args, kwargs = rebuild(arrays)
            return method(module, *args, **kwargs)

        hooks.before()
        return hooks.results(nnx.remat(call, **options._asdict())(module, arrays))

    return block


def _like(cls, call) -> dict:
    functools.update_wrapper(call, cls.__call__)
    return {
        "__call__": call,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__annotations__": {},
    }


def _partition(fn, args, kwargs, static_argnames):
    """The array leaves of a call's arguments, and a function that puts (traced) leaves back in their places."""
    signature, held, traced = None, {}, (args, kwargs)
    if static_argnames:
        signature = inspect.signature(fn)
        unknown = static_argnames - set(signature.parameters)
        if unknown:
            raise InputError(
                wanted=f"static_argnames among {', '.join(signature.parameters)}",
                got=", ".join(sorted(unknown)),
                do="Correct the name.",
            )
        bound = signature.bind(*args, **kwargs).arguments
        held = {k: v for k, v in bound.items() if k in static_argnames}
        traced = {k: v for k, v in bound.items() if k not in static_argnames}
    leaves, tree = jax.tree.flatten(traced)
    is_array = [isinstance(leaf, (jax.Array, np.ndarray, np.generic)) for leaf in leaves]

    def rebuild(arrays):
        arrays = iter(arrays)
        new = [next(arrays) if array else leaf for leaf, array in zip(leaves, is_array, strict=True)]
        traced = tree.unflatten(new)
        if signature is None:
            return traced
        bound = inspect.BoundArguments(signature, {**traced, **held})
        return bound.args, bound.kwargs

    return [leaf for leaf, array in zip(leaves, is_array, strict=True) if array], rebuild


def is_checkpoint(jaxpr) -> bool:
    """Whether a program is one checkpoint and nothing else, watched or not."""
    blocks = [prevents_cse(eqn) is not None for eqn in jaxpr.eqns if eqn.primitive.name != WATCH]
    return blocks == [True]


def _is_a(cls, module: str, name: str) -> bool:
    """issubclass without importing flax: an instance of a module that was never imported cannot exist."""
    loaded = sys.modules.get(module)
    return loaded is not None and issubclass(cls, getattr(loaded, name))
