"""What a block says about Flax modules that it closes over, and changes where the change is lost."""

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jaxmem.errors import InputError
from jaxmem.remat._arguments import is_a, is_linen, is_nnx


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
