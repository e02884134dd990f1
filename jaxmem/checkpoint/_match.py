"""`match`: where each leaf of a tree is in a checkpoint, or what does not fit, by name, before anything is read."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    for pattern in [cast] if isinstance(cast, str) else cast:
        try:
            of = re.compile(pattern)
        except (re.error, TypeError) as error:
            raise CheckpointError(
                wanted="cast to be names of leaves, their first parts, or regular expressions",
                got=f"{pattern!r} ({error})",
                do="For example cast='opt_state'.",
            ) from None
        matched = {name for name in names if of.fullmatch(name) or name.startswith(pattern.rstrip("/") + "/")}
        if not matched:
            raise CheckpointError(
                wanted="every pattern of cast to match a leaf of floats",
                got=f"{pattern!r}, which matches none",
                do=f"Leaves are, for example: {', '.join(names[:3]) or '-'}. A regular expression has to match "
                "the whole name, as .*/mu/.* does.",
            )
        found |= matched
    return found


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
