"""A call of a function as it will be made: what is jitted, and with which arguments."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxmem._flax import is_nnx_object
from jaxmem.errors import InputError
from jaxmem.targets import Placed, Target, place


@dataclasses.dataclass(frozen=True, kw_only=True)
class Called:
    """A call of a function.

    Args:
      fn: the function, jitted or not.
      args, keywords: what it is called with.
    """

    fn: Callable
    args: tuple[Any, ...]
    keywords: Mapping[str, Any]

    @classmethod
    def of(cls, fn: Callable, args: tuple[Any, ...], keywords: Mapping[str, Any], name: str) -> "Called":
        """The call `fn(*args, **keywords)`, of the jitted function where `fn` is a partial or a method of one.

        Jitting a partial of a jitted function again would lose what that donates. Keywords that the signature has a
        place for become positional, as the paths of arguments do not tell the difference.

        Raises:
          InputError: for arguments that do not fit the function.
        """
        jitted = _jitted_within(fn)
        if jitted is not None:
            fn, bound, given = jitted
            args, keywords = (*bound, *args), {**given, **keywords}
        try:
            signature = inspect.signature(fn)
        except ValueError:  # a builtin without a signature
            return cls(fn=fn, args=args, keywords=keywords)
        try:
            signature.bind(*args, **keywords)
        except TypeError as error:
            bare = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
            with_names = f" and {', '.join(keywords)} by name" if keywords else ""
            raise InputError(
                wanted=f"the arguments of {name!r}: {inspect.Signature(bare)}",
                got=f"{len(args)} of them{with_names} ({error})",
                do="Pass arrays or jax.ShapeDtypeStruct after the function.",
            ) from None
        places = [p for p in signature.parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        keywords = dict(keywords)
        for parameter in places[len(args) :]:
            if parameter.name not in keywords:
                break
            args = (*args, keywords.pop(parameter.name))
        return cls(fn=fn, args=args, keywords=keywords)

    @property
    def jit(self) -> Callable:
        """What jits the function: `nnx.jit` where it is given nnx objects, which it may update."""
        if not any(map(is_nnx_object, jax.tree.leaves((self.args, self.keywords), is_leaf=is_nnx_object))):
            return jax.jit
        from flax import nnx

        return nnx.jit

    def placed(self, target: Target, in_shardings: Any, move: Callable) -> tuple["Called", Placed, tuple[str, ...]]:
        """The call with its arrays as shapes on a target, what `place` says, and what `move` says.

        Variables that nnx objects share stay shared.

        Args:
          move: `move(args, target) -> (args, notes)`, before they are placed.
        """
        leaves, tree = jax.tree.flatten((self.args, self.keywords), is_leaf=is_nnx_object)
        objects = [leaf for leaf in leaves if is_nnx_object(leaf)]
        if not objects:
            args = (*self.args, self.keywords) if self.keywords else self.args
            args, notes = move(args, target)
            found = place(args, target, in_shardings=in_shardings)
            args = found.args[: len(self.args)]
            keywords = found.args[-1] if self.keywords else {}
            return dataclasses.replace(self, args=args, keywords=keywords), found, notes
        from flax import nnx

        graph, state = nnx.split(objects)
        others = [None if is_nnx_object(leaf) else leaf for leaf in leaves]
        args, notes = move((state, others), target)
        found = place(args, target)
        state, others = found.args
        merged = iter(nnx.merge(graph, state))
        leaves = [next(merged) if is_nnx_object(a) else b for a, b in zip(leaves, others, strict=True)]
        args, keywords = jax.tree.unflatten(tree, leaves)
        return dataclasses.replace(self, args=args, keywords=keywords), found, notes


def _jitted_within(fn: Callable) -> tuple[Callable, tuple, dict] | None:
    """The jitted function in a partial or a bound method, with what that gives it; None where there is none."""
    if isinstance(fn, functools.partial):
        within = _jitted_within(fn.func)
        if within is None:
            return None
        inner, args, keywords = within
        return inner, (*args, *fn.args), {**keywords, **fn.keywords}
    if inspect.ismethod(fn) and hasattr(fn.__func__, "trace"):
        return fn.__func__, (fn.__self__,), {}
    return (fn, (), {}) if hasattr(fn, "trace") else None
