"""What a block is given: what a checkpoint has to be told of, what keeps its Python value, what it only closes over."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jaxmem._flax import is_a, is_nnx
from jaxmem.errors import InputError

_ARRAYS = (jax.Array, np.ndarray, np.generic)


def partition(fn: Callable, args: tuple, kwargs: dict, static_argnames: frozenset[str]):
    """The leaves of a call that pass through a checkpoint, and a function that puts their stand-ins in their places.

    These are arrays; nnx objects, which would be updated in a copy if they passed as pytrees; and, where the first
    argument is a linen module, as in its methods, all linen modules, whose parameters would be created inside the
    checkpoint. Everything else stays in its place.
    """
    signature, bound, held, traced = None, {}, {}, (args, kwargs)
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
        traced = [v for k, v in bound.items() if k not in static_argnames]
    leaves, tree = jax.tree.flatten(traced, is_leaf=is_nnx)
    lifts = bool(args and leaves) and leaves[0] is args[0] and is_linen(args[0], "Module")
    passes = [_may_change(x) if is_nnx(x) else isinstance(x, _ARRAYS) or (lifts and is_linen(x)) for x in leaves]

    def rebuild(passed):
        passed = iter(passed)
        new = [next(passed) if p else leaf for leaf, p in zip(leaves, passes, strict=True)]
        traced = tree.unflatten(new)
        if signature is None:
            return traced
        traced = iter(traced)
        values = {k: held[k] if k in held else next(traced) for k in bound}
        call = inspect.BoundArguments(signature, values)
        return call.args, call.kwargs

    return [leaf for leaf, p in zip(leaves, passes, strict=True) if p], rebuild


def carrying_state(around: Callable[[Callable], Callable], call: Callable, leaves: list) -> Any:
    """`around(call)(*leaves)`, where the state of nnx objects among the leaves goes in and comes out as a pytree."""
    from flax import nnx

    objects = [leaf for leaf in leaves if is_nnx(leaf)]
    graph, state = nnx.split(objects)

    def pure(*given):
        *given, state = given
        objects = nnx.merge(graph, state)
        inner, others = iter(objects), iter(given)
        out = call(*[next(inner if is_nnx(leaf) else others) for leaf in leaves])
        return out, nnx.state(objects)

    pure.__name__ = call.__name__
    out, state = around(pure)(*[leaf for leaf in leaves if not is_nnx(leaf)], state)
    nnx.update(objects, state)
    return out


def is_linen(x: Any, *kinds: str) -> bool:
    """Whether it is a linen module or variable, or one of `kinds`, with a scope of parameters that it reads."""
    return any(is_a(type(x), "flax.linen", kind) for kind in kinds or ("Module", "Variable")) and x.scope is not None


def _may_change(x: Any) -> bool:
    """Whether an nnx object is of this trace. One of an outer trace is a constant here, which nnx.remat would break."""
    from flax import errors, nnx

    try:
        for _, node in nnx.iter_graph(x):
            if isinstance(node, nnx.Variable):
                node.set_raw_value(node.get_raw_value())  # refused where nothing can be set
    except errors.TraceContextError:
        return False
    return True


def call_explained(fn: Callable, args: tuple, kwargs: dict) -> Any:
    """`fn(*args, **kwargs)` inside a checkpoint; InputError where it changes a Flax module it was not given.

    nnx refuses the change, in words that do not know of the block. linen makes it, and JAX complains much later of an
    escaped tracer.
    """
    held = list(_flax_objects(_closed_over(fn)))
    linen = [x for x in held if is_linen(x)]
    before = _variables(linen)
    try:
        out = fn(*args, **kwargs)
    except Exception as error:
        nnx = [x for x in held if is_nnx(x)]
        if not (nnx and is_a(type(error), "flax.errors", "TraceContextError")):
            raise
        raise _closes_over(fn, nnx, "to the block") from error
    after = _variables(linen)
    if len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True)):
        raise _closes_over(fn, linen, "to the block as its first argument")
    return out


def _closes_over(fn, modules, where: str) -> InputError:
    return InputError(
        wanted="a block that is given the Flax modules whose variables it creates or updates",
        got=f"{getattr(fn, '__name__', type(fn).__name__)!r}, which closes over "
        + ", ".join(sorted({type(x).__name__ for x in modules})),
        do=f"Pass the module {where}: memory.block(lambda module, x: module(x))(module, x).",
    )


def _variables(modules) -> list:
    return [leaf for module in modules for leaf in jax.tree.leaves(_collections(module))]


def _collections(module):
    return module.variables if is_a(type(module), "flax.linen", "Module") else module.value


def _closed_over(fn) -> list:
    """What a function holds beside its arguments: of closures, partials, globals and bound methods."""
    if isinstance(fn, functools.partial):
        return [fn.args, fn.keywords, _closed_over(fn.func)]
    held = [getattr(fn, "__self__", None)]
    fn = getattr(fn, "__func__", fn)
    if inspect.isfunction(fn):
        held += [fn.__globals__[name] for name in fn.__code__.co_names if name in fn.__globals__]
        for cell in fn.__closure__ or ():
            with contextlib.suppress(ValueError):  # a cell that has no value yet
                held.append(cell.cell_contents)
    return held


def _flax_objects(x, depth: int = 4) -> Iterator:
    """Flax objects in containers, which may be large or hold themselves."""
    if is_nnx(x) or is_linen(x):
        yield x
    elif depth and isinstance(x, (list, tuple, dict)):
        for item in x.values() if isinstance(x, dict) else x:
            yield from _flax_objects(item, depth - 1)
