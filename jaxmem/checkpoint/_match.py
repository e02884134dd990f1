"""`match`: where each leaf of a tree is in a checkpoint, or what does not fit, by name, before anything is read."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._shown import Brief
from jaxmem.checkpoint._causes import OPTIMIZER, Differences, is_below, likely_cause
from jaxmem.checkpoint._leaves import Leaf, described, is_number, named_leaves
from jaxmem.checkpoint._windows import migrate
from jaxmem.errors import CheckpointError, CheckpointMismatchError

_NAMED = 3  # leaves of a kind that a message names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading(Brief):
    """Where each leaf of a tree comes from.

    Args:
      sources: name wanted → name in the checkpoint, of leaves that are read.
      leaves: name wanted → what the checkpoint says of it. Where its dtype is not the one wanted, it is cast.
      zeros: names of leaves that are not read, but made of zeros: empty accumulators, arrays without elements.
      notes: what was migrated, a sentence each.
    """

    sources: Mapping[str, str]
    leaves: Mapping[str, Leaf]
    zeros: frozenset[str]
    notes: tuple[str, ...]


def match(
    saved: Mapping[str, Leaf],
    like: Any,
    *,
    cast: str | Sequence[str] = (),
    mid_window: Mapping[str, Mapping[str, int]] | None = None,
    optimizer: Any = None,
    where: Any = "the checkpoint",
) -> Reading:
    """Finds every leaf of a tree in a checkpoint. Reads nothing.

    A state of `multi_steps` or `optax.MultiSteps` is found in a checkpoint without one, and the other way round, and
    one in the other, if the checkpoint was saved at the end of a window: the moments are kept, the accumulator is
    empty.

    Args:
      saved: of the checkpoint.
      like: a pytree of arrays or `ShapeDtypeStruct`s. A Python number takes any number of its kind.
      cast: whose floats may come in another dtype: names, their first parts ("opt_state"), or regular expressions of
        whole names (".*/mu/.*").
      mid_window: what `window_facts` said when it was saved.
      optimizer: the one that will go on from `like`; one of `multi_steps` tells of how many micro-steps a window is.
      where: the checkpoint is, for messages.

    Raises:
      CheckpointMismatchError: leaves are missing in the checkpoint or in the tree, or have other shapes or dtypes, or
        the optimizer changes in mid-window.
      CheckpointError: a leaf of `like` is no array; a pattern of `cast` matches no leaf.

    >>> import jax.numpy as jnp
    >>> saved = {"w": Leaf(shape=(3,), dtype="float32"), "b": Leaf(shape=(), dtype="float32")}
    >>> match(saved, {"w": jnp.ones(3), "b": jnp.zeros(())}).sources
    {'b': 'b', 'w': 'w'}
    >>> match(saved, {"w": jnp.ones(4), "b": jnp.zeros(())}, where="runs/40")
    Traceback (most recent call last):
    jaxmem.errors.CheckpointMismatchError: Wanted in runs/40 the 2 leaves of the tree to restore; got 1 leaf of \
another shape: w float32[3] instead of float32[4]. Make the tree with the model, optimizer and config that the \
checkpoint was saved with.
    """
    trees = named_leaves(like)
    wanted = {name: described(leaf, name) for name, leaf in trees.items()}
    _check_jax_holds(trees, wanted)
    may_cast = _matched(cast, [name for name, leaf in wanted.items() if _kind(leaf.dtype) in ("float", "complex")])
    moved = migrate(saved, wanted, mid_window or {}, optimizer)
    sources = {name: moved.moved.get(name, name) for name in wanted if name not in moved.zeros}

    def may_differ(name: str) -> bool:  # of dtypes of one kind
        return name in may_cast or is_number(trees[name])

    found = _differences(saved, wanted, sources, moved.dropped, may_differ)
    if found:
        raise CheckpointMismatchError(
            wanted=f"in {where} the {_leaves(len(wanted))} of the tree to restore",
            got=_told(found),
            do=likely_cause(found, len(wanted) - len(found.missing) - len(found.shapes)),
        )
    if moved.refused:
        of, got, do = moved.refused
        raise CheckpointMismatchError(wanted=of, got=f"{got}: {where}", do=do)
    empty = {name for name, source in sources.items() if not saved[source].size}
    return Reading(
        sources={name: source for name, source in sources.items() if name not in empty},
        leaves={name: saved[source] for name, source in sources.items()},
        zeros=frozenset(moved.zeros | empty),
        notes=tuple(moved.notes),
    )


def _differences(
    saved: Mapping[str, Leaf],
    wanted: Mapping[str, Leaf],
    sources: Mapping[str, str],
    dropped: set[str],
    may_differ: Callable[[str], bool],
) -> Differences:
    found = Differences()
    for name, source in sources.items():
        want, have = wanted[name], saved.get(source)
        if have is None:
            found.missing[name] = want
        elif have.key != want.key:
            found.keys[name] = have, want
        elif have.shape != want.shape:
            found.shapes[name] = have, want
        elif have.dtype != want.dtype and not (_kind(have.dtype) == _kind(want.dtype) and may_differ(name)):
            found.dtypes[name] = have, want
            if _kind(have.dtype) == _kind(want.dtype) in ("float", "complex"):
                found.castable.add(name)
    read = {*sources.values(), *dropped}
    found.unwanted.update({name: leaf for name, leaf in saved.items() if name not in read})
    return found


@functools.cache
def _kind(dtype: str) -> str:
    kinds = {"complex": jnp.complexfloating, "float": jnp.floating, "int": jnp.integer}
    return next((kind for kind, of in kinds.items() if jnp.issubdtype(jnp.dtype(dtype), of)), "bool")


def _matched(cast: str | Sequence[str], names: list[str]) -> set[str]:
    """The names, of floats, that patterns match."""
    found = set()
    for pattern in [cast] if isinstance(cast, str) or not isinstance(cast, Iterable) else cast:
        if not isinstance(pattern, str):
            raise _no_pattern(f"a {type(pattern).__name__}")
        matched = {name for name in names if name == pattern or name.startswith(pattern.rstrip("/") + "/")}
        try:
            of = re.compile(pattern)
        except re.error as error:
            if not matched:
                raise _no_pattern(f"{pattern!r} ({error})") from None
        else:
            matched |= {name for name in names if of.fullmatch(name)}
        if not matched:
            raise CheckpointError(
                wanted="every pattern of cast to match a leaf of floats",
                got=f"{pattern!r}, which matches none",
                do=f"Leaves are, for example: {', '.join(names[:3]) or '-'}. A regular expression has to match "
                "the whole name, as .*/mu/.* does.",
            )
        found |= matched
    return found


def _no_pattern(got: str) -> CheckpointError:
    return CheckpointError(
        wanted="cast to be names of leaves, their first parts, or regular expressions",
        got=got,
        do="For example cast='opt_state'.",
    )


def _check_jax_holds(trees: Mapping[str, Any], wanted: Mapping[str, Leaf]) -> None:
    """CheckpointError for an array that cannot be where it is wanted, or only with half of its bits (0 for 2**40)."""
    for name, tree in trees.items():
        if not hasattr(tree, "sharding"):
            continue
        try:
            if tree.sharding is not None and not isinstance(tree, jax.Array):
                tree.sharding.devices_indices_map(tuple(tree.shape))
        except Exception as error:
            raise CheckpointError(
                wanted=f"a sharding that can hold {name} {wanted[name]}",
                got=f"{tree.sharding}: {error}".rstrip("."),
                do="Give the tree shardings of a mesh with devices, which divide its arrays.",
            ) from error
        if not wanted[name].key and jax.dtypes.canonicalize_dtype(tree.dtype) != tree.dtype:
            raise CheckpointError(
                wanted=f"to restore {name} as {wanted[name]}",
                got="JAX without 64 bits",
                do='Call jax.config.update("jax_enable_x64", True), or restore it as an array of NumPy.',
            )


def _told(found: Differences) -> str:
    """What does not fit: a few of each kind by name, the rest counted."""
    groups = {
        "that it lacks": {name: str(leaf) for name, leaf in found.missing.items()},
        "that the tree lacks": {name: str(leaf) for name, leaf in found.unwanted.items()},
    }
    for kind, pairs in {"shape": found.shapes, "dtype": found.dtypes, "key implementation": found.keys}.items():
        groups[f"of another {kind}"] = {name: f"{have} instead of {want}" for name, (have, want) in pairs.items()}
    return "; ".join(f"{_leaves(len(told))} {kind}: {_some(told)}" for kind, told in groups.items() if told)


def _some(told: Mapping[str, str]) -> str:
    names = sorted(told, key=lambda name: is_below(name, OPTIMIZER))  # parameters say more than their moments
    more = [f"and {len(names) - _NAMED} more"] if len(names) > _NAMED else []
    return ", ".join([*(f"{name} {told[name]}" for name in names[:_NAMED]), *more])


def _leaves(number: int) -> str:
    return f"{number} {'leaf' if number == 1 else 'leaves'}"
