"""`wrap`: a function, a linen or nnx module as one block of `jax.checkpoint`."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from jaxmem._flax import is_a, is_nnx
from jaxmem.errors import InputError
from jaxmem.remat._arguments import call_explained, carrying_state, is_linen, partition


class Options(NamedTuple):
    """Keyword arguments of jax.checkpoint, nn.remat and nnx.remat."""

    policy: Callable
    prevent_cse: bool

    def run(self, call: Callable, leaves: list, module: Any) -> Any:
        """`call(*leaves)` as one block; see `_checkpoint`."""
        return _checkpoint(call, leaves, module, self._asdict())


class Hooks(NamedTuple):
    """What else happens at each call of a block; equal by value, like options.

    Args:
      before: called without arguments, before the block.
      results: called with the block's results, and returns them.
    """

    before: Callable[[], None] = lambda: None
    results: Callable[[Any], Any] = lambda out: out


NO_HOOKS = Hooks()
_NO_SELF = (staticmethod, classmethod)
CALL = ("__call__",)  # the methods of a module class that are blocks where nothing is said


def wrap(target: Any, options: Options, static_argnames=(), methods=CALL, hooks: Hooks = NO_HOOKS) -> Any:
    """`target` under `jax.checkpoint`; see `jaxmem.remat.checkpoint`.

    Args:
      target: the block.
      options: for `jax.checkpoint`; or another value, equal to those that do the same, with a method `run`.
      static_argnames: array arguments to be passed by value.
      methods: of a module class, those that are blocks.
      hooks: around each call.
    """
    names = frozenset((static_argnames,) if isinstance(static_argnames, str) else static_argnames)
    methods = (methods,) if isinstance(methods, str) else tuple(methods)
    if _is_module_class(target):
        return _module_class(target, methods, names, options, hooks)
    if methods != CALL:
        raise InputError(
            wanted="methods with a linen or nnx module class",
            got=f"methods={methods!r} with {target!r}",
            do="Wrap the class, or each bound nnx method by itself.",
        )
    if is_a(type(target), "flax.nnx", "Module"):
        return _bound(_block(type(target).__call__, names, options, hooks), target)
    owner = getattr(target, "__self__", None)
    if is_a(type(owner), "flax.nnx", "Module"):
        # The very function: by its name, super().method would be the override that calls it.
        method = getattr(target, "__func__", None) or getattr(type(owner), target.__name__)
        return _bound(_block(method, names, options, hooks), owner)
    for kind in (type(target), type(owner)):
        if is_a(kind, "flax.linen", "Module"):
            raise InputError(
                wanted="a linen module class as a block",
                got=f"an instance of {kind.__name__}",
                do=f"Wrap the class before it is instantiated: memory.block({kind.__name__})(...)(x).",
            )
    if inspect.isclass(target) or not callable(target) or _is_module_class(owner):
        raise InputError(
            wanted="a function, a linen or nnx module class, an nnx module or a bound nnx method",
            got=f"{target!r}",
            do="Wrap the function that computes the block.",
        )
    return _block(target, names, options, hooks)


def _block(fn: Callable, names, options, hooks) -> Callable:
    """A function of arrays, Flax objects and Python values under the checkpoint that suits its arguments."""
    name = getattr(fn, "__name__", type(fn).__name__)

    @functools.wraps(fn)
    def block(*args, **kwargs):
        leaves, rebuild = partition(fn, args, kwargs, names)

        def call(*leaves):
            args, kwargs = rebuild(leaves)
            return call_explained(fn, args, kwargs)

        if name != "__call__":  # linen names no scope after it
            call.__name__ = name
        module = leaves[0] if leaves and is_linen(leaves[0]) else None
        hooks.before()
        return hooks.results(options.run(call, leaves, module))

    return block


def _checkpoint(call: Callable, leaves: list, module, options: dict) -> Any:
    """`call(*leaves)` under jax.checkpoint, or under Flax's own, which carries what its objects change out of it.

    Args:
      call: function of leaves.
      leaves: arrays and Flax objects.
      module: the linen module whose method or function it is, the first of the leaves; None where it is of none.
      options: for `jax.checkpoint`.
    """
    holds_objects = any(map(is_nnx, leaves))
    if module is None:
        if not holds_objects:
            return jax.checkpoint(call, **options)(*leaves)
        from flax import nnx

        return nnx.remat(call, **options)(*leaves)
    from flax import linen as nn

    lifted = functools.partial(nn.remat, **options)
    return carrying_state(lifted, call, leaves) if holds_objects else lifted(call)(*leaves)


def _bound(block: Callable, module) -> Callable:
    @functools.wraps(block)
    def method(*args, **kwargs):
        return block(module, *args, **kwargs)

    return method


@functools.lru_cache(maxsize=1024)  # one class per block and policy: module classes are compared by identity
def _module_class(cls, methods, names, options, hooks):
    own = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}  # without type's
    missing = [name for name in methods if not callable(own.get(name)) or isinstance(own[name], _NO_SELF)]
    if missing:
        raise InputError(
            wanted=f"the methods of {cls.__name__} that are blocks",
            got=", ".join(map(repr, missing)) + ", which are none of its methods, or have no self",
            do="Name them, for example methods=('__call__', 'encode').",
        )
    # The class keeps its name: linen builds parameter paths from it ("Block_0"), and saved parameters stay valid.
    body = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__annotations__": {},
    }
    blocks = {name: _block(getattr(cls, name), names, options, hooks) for name in methods}
    return type(cls)(cls.__name__, (cls,), body | blocks)


def _is_module_class(x) -> bool:
    return inspect.isclass(x) and (is_a(x, "flax.linen", "Module") or is_a(x, "flax.nnx", "Module"))
