"""What the arguments of a program hold, by their paths."""

import collections
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jaxmem._signatures import argument_names
from jaxmem.analysis._records import KINDS
from jaxmem.analysis._state_types import recognise
from jaxmem.errors import InputError

# The field of an optax.MultiStepsState, wherever in the arguments such a state is.
_ACCUMULATORS = re.compile(r"\.acc_grads(?=[.\[]|$)")


def kinds_by_path(
    kinds: Mapping[str, str] | Sequence[str] | None, fn: Callable | None = None
) -> Callable[[str], str] | None:
    """A function from an argument's path to its kind: that of the longest given path which begins it; "" without one.

    The `acc_grads` of an `optax.MultiStepsState`, or of `jaxmem.accumulate.multi_steps`, are accumulators by
    themselves within optimizer state.

    Args:
      kinds: by path, or one for each positional argument of `fn`.
      fn: names the positional arguments.

    Raises:
      InputError: a kind that is none of `KINDS`, or something that is no mapping.

    >>> kind_of = kinds_by_path({"state": "state", "state.params": "parameters"})
    >>> kind_of("state.params['w']"), kind_of("state.step"), kind_of("x")
    ('parameters', 'state', '')
    """
    if kinds is None:
        return None
    if isinstance(kinds, (tuple, list)) and fn is not None:
        kinds = dict(zip(argument_names(fn, len(kinds)), kinds, strict=True))
    if not isinstance(kinds, Mapping) or not all(isinstance(p, str) and kinds[p] in KINDS for p in kinds):
        raise InputError(
            wanted=f"arg_kinds={{path: kind}} with kinds of {', '.join(KINDS)}",
            got=repr(kinds),
            do='For example arg_kinds={"params": "parameters"}, or one kind for each argument.',
        )
    paths = sorted(kinds, key=len, reverse=True)

    def kind_of(path: str) -> str:
        given = next((p for p in paths if _begins(p, path)), None)
        if given is None:
            return ""
        inside = undeclared_kind(path[len(given) :])
        kind = kinds[given]
        return inside if kind in ("arguments", "optimizer_state") and inside != "arguments" else kind

    return kind_of


def undeclared_kind(path: str) -> str:
    """The kind of an argument whose kind is neither declared nor told by a type.

    >>> undeclared_kind("state.acc_grads['w']"), undeclared_kind("state.mini_step")
    ('accumulators', 'arguments')
    """
    return "accumulators" if _ACCUMULATORS.search(path) else "arguments"


def check_kinds(kinds: Mapping[str, str] | Sequence[str] | None, fn: Callable, args: Sequence[Any]) -> None:
    """Refuses kinds that are declared for arguments that do not exist.

    Args:
      kinds: as for `kinds_by_path`, which has accepted it.
      fn: names the positional arguments.
      args: its arguments.

    Raises:
      InputError: a path that begins none of the arguments', or another number of kinds than of arguments.
    """
    if kinds is None:
        return
    names = argument_names(fn, len(args))
    if not isinstance(kinds, Mapping):
        if len(kinds) != len(args):
            raise InputError(
                wanted=f"one kind in arg_kinds for each of the {len(args)} argument(s)",
                got=f"{len(kinds)} of them",
                do='Give one for each, or name paths: arg_kinds={"params": "parameters"}.',
            )
        return
    leaves = [
        name + jax.tree_util.keystr(path)
        for name, arg in zip(names, args, strict=True)
        for path, _ in jax.tree_util.tree_flatten_with_path(arg)[0]
    ]
    existing = [*names, *leaves]  # an argument may have no leaves
    unknown = [path for path in kinds if not any(_begins(path, other) for other in existing)]
    if unknown:
        near = [name for name in names if any(_begins(name, path) for path in unknown)]
        within = [leaf for leaf in leaves if any(_begins(name, leaf) for name in near)]
        within = within or (leaves if 0 < len(leaves) <= 8 else names)
        shown = ", ".join(within[:8]) + (", …" if len(within) > 8 else "")
        raise InputError(
            wanted="paths in arg_kinds that begin those of the arguments",
            got=f"{', '.join(map(repr, unknown))}, which is none of theirs",
            do=f"There are {shown}." if within else "There are no arguments.",
        )


def shared_arrays(fn: Callable, args: Sequence[Any]) -> tuple[str, ...]:
    """A warning where one array is two leaves of training state, which no call may donate twice; else nothing.

    Args:
      fn: names the arguments.
      args: its arguments, arrays or shapes.
    """
    names, by_array = argument_names(fn, len(args)), collections.defaultdict(list)
    leaves = jax.tree_util.tree_leaves_with_path(tuple(args))
    for (path, leaf), kind in zip(leaves, recognise(tuple(args)).kinds, strict=True):
        if isinstance(leaf, jax.Array) and leaf.ndim and kind != "arguments":
            by_array[id(leaf)].append(names[path[0].idx] + jax.tree_util.keystr(path[1:]))
    shared = [paths for paths in by_array.values() if len(paths) > 1]
    if not shared:
        return ()
    more = f", and {len(shared) - 1} more" if len(shared) > 1 else ""
    return (
        f"{' and '.join(shared[0])} are one array{more}: a call that donates it fails, since no buffer can be donated "
        "twice. Begin with a copy, jax.tree.map(jnp.copy, ...).",
    )


def _begins(start: str, path: str) -> bool:
    return path.startswith(start) and path[len(start) : len(start) + 1] in ("", ".", "[")
