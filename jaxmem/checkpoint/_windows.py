"""Windows of `accumulate.multi_steps` and `optax.MultiSteps` in a checkpoint: turned on or off, or of another K.

A state of either has the fields of `optax.MultiStepsState`. It is found by their names, since a checkpoint, and a tree
of nnx, has no types.
"""

import dataclasses
import functools
import inspect
import types
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from jaxmem import _compat
from jaxmem.checkpoint._leaves import Leaf, named_leaves

_INNER = "inner_opt_state"
_EMPTIED = ("acc_grads", "skip_state")


@dataclasses.dataclass
class Migration:
    """Where leaves come from that are not where their names say.

    Args:
      moved: name wanted → name in the checkpoint.
      zeros: names wanted that begin with zeros.
      dropped: names in the checkpoint that are not needed any more.
      notes: what was done, in words.
      refused: (wanted, got, do) where a window is not at its end.
    """

    moved: dict[str, str] = dataclasses.field(default_factory=dict)
    zeros: set[str] = dataclasses.field(default_factory=set)
    dropped: set[str] = dataclasses.field(default_factory=set)
    notes: list[str] = dataclasses.field(default_factory=list)
    refused: tuple[str, str, str] | None = None


def window_facts(tree: Any, optimizer: Any = None) -> dict[str, dict[str, int]]:
    """What a manifest says of the windows in a tree: path → mini_step, gradient_step and, where known, every.

    Waits for these scalars to be computed. Of optimizers under vmap it is the one that is furthest.

    Args:
      tree: that is saved.
      optimizer: the one whose state is in it, made by `multi_steps` or `optax.MultiSteps`; it tells `every`.

    >>> import jax.numpy as jnp, optax
    >>> state = optax.MultiSteps(optax.sgd(0.1), 4).init(jnp.ones(3))
    >>> window_facts({"opt_state": state})
    {'opt_state': {'mini_step': 0, 'gradient_step': 0}}
    """
    leaves = named_leaves(tree)
    found = _windows(leaves)
    facts = {
        path: {name: int(np.max(leaves[_at(path) + name])) for name in ("mini_step", "gradient_step")} for path in found
    }
    for path in _outermost(found):
        if every := _every(optimizer, facts[path]):
            facts[path]["every"] = every
    return facts


def migrate(
    saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf], facts: Mapping[str, Mapping[str, int]], optimizer: Any
) -> Migration:
    """How the windows of a checkpoint become those wanted.

    Args:
      saved, wanted: name → leaf.
      facts: of `window_facts`, as saved.
      optimizer: that will go on, None where it is not known.
    """
    made = Migration()
    old, new = _windows(saved), _windows(wanted)
    for path in dict.fromkeys([*old, *new]):
        before, after = _kind(saved, path), _kind(wanted, path)
        fact = facts.get(path, {})
        was = fact.get("every")
        every = _every(optimizer, fact) if after and path in _outermost(new) else None
        another_k = bool(before and after and was and every and was != every)
        if before and (before != after or another_k) and fact.get("mini_step") != 0:
            made.refused = _in_mid_window(path, fact, before, after, every)
        if before == after and (another_k or fact.get("mini_step") == 0):
            _keep_what_fits(made, saved, wanted, path)
        elif before and after and before != after:
            made.zeros.update(_emptied(wanted, path))
            made.dropped.update(_emptied(saved, path))
            made.notes.append(f"{_said(path)}: from {before} to {after}, with an empty accumulator")
        elif after and not before:
            _turn_on(made, saved, wanted, path)
        elif before and not after:
            _turn_off(made, saved, wanted, path)
    return made


def _turn_on(made: Migration, saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf], path: str) -> None:
    at = _at(path)
    for name in wanted:
        if name.startswith(at + _INNER + "/"):
            made.moved[name] = at + name.removeprefix(at + _INNER + "/")
    made.zeros.update(_bookkeeping(wanted, path))
    steps = _optimizer_steps(saved, wanted, path)
    if steps is not None:
        made.zeros.discard(at + "gradient_step")
        made.moved[at + "gradient_step"] = steps
    made.notes.append(
        f"{_said(path)}: {_kind(wanted, path)} is turned on, with an empty accumulator; gradient_step is "
        + (f"that of {steps}" if steps is not None else "0")
    )


def _turn_off(made: Migration, saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf], path: str) -> None:
    at = _at(path)
    for name in wanted:
        inner = f"{at}{_INNER}/{name.removeprefix(at)}"
        if name.startswith(at) and inner in saved:
            made.moved[name] = inner
    made.dropped.update(_bookkeeping(saved, path))
    made.notes.append(f"{_said(path)}: {_kind(saved, path)} is turned off")


def _optimizer_steps(saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf], path: str) -> str | None:
    """The leaf of a checkpoint that counts optimizer steps: `step` of the state round it, or an optimizer's own."""
    parts = path.split("/")[:-1] if path else []
    around = ["/".join([*parts[:end], "step"]) for end in range(len(parts), -1, -1)] if path else []
    inside = sorted((name for name in saved if f"/{name}".endswith("/count") and name.startswith(_at(path))), key=len)
    counter = wanted[_at(path) + "gradient_step"]
    return next((name for name in [*around, *inside] if saved.get(name) == counter), None)


def _keep_what_fits(made: Migration, saved: Mapping[str, Leaf], wanted: Mapping[str, Leaf], path: str) -> None:
    """At a window's end its accumulator is not needed; one of another dtype begins with zeros."""
    for name in _emptied(wanted, path):
        if saved.get(name) != wanted[name]:
            made.zeros.add(name)
            made.dropped.add(name)
    made.dropped.update(set(_emptied(saved, path)) - set(wanted))


def _in_mid_window(path, fact, before, after, every) -> tuple[str, str, str]:
    taken, was = fact.get("mini_step"), fact.get("every")
    if after == before:
        change = f"every changes from {was} to {every}"
    else:
        change = f"{before}{f' of every {was}' if was else ''} becomes {after or 'an optimizer without windows'}"
    of = f" of {was}" if was else ""
    got = (
        f"one in mid-window, whose accumulator holds the gradients of {taken}{of} micro-steps"
        if taken is not None
        else "one that does not say how far its window is"
    )
    more = f"{was - taken} more" if was and taken is not None else "the remaining"
    one = "micro-step, which ends" if more == "1 more" else "micro-steps, which end"
    return (
        f"a checkpoint saved at the end of a window, since at {_said(path)} {change}",
        got,
        f"Restore it with the optimizer that it was saved with, take {more} {one} the window, and save; or take a "
        "checkpoint of a window's end.",
    )


def _windows(names: Iterable[str]) -> list[str]:
    """Paths of all states of multi_steps, outermost first."""
    names = set(names)
    paths = [name[: -len("/mini_step")] for name in names if f"/{name}".endswith("/mini_step")]
    return sorted((path for path in paths if _at(path) + "gradient_step" in names), key=lambda path: (len(path), path))


def _outermost(paths: list[str]) -> list[str]:
    """The windows that no other holds."""
    return [path for path in paths if not any(path != other and path.startswith(_at(other)) for other in paths)]


def _kind(names: Mapping[str, Any], path: str) -> str:
    at = _at(path)
    if at + "mini_step" not in names or at + "gradient_step" not in names:
        return ""
    return "multi_steps" if at + "skip_state/window_weight" in names else "optax.MultiSteps"


def _every(optimizer: Any, fact: Mapping[str, int]) -> int | None:
    """K of an optimizer's windows; None where it is not known, or those side by side have several."""
    known = set()
    for every in _counters(optimizer):
        if callable(every):
            every = every(np.int32(fact["gradient_step"])) if "gradient_step" in fact else None
        known.add(None if every is None else int(np.asarray(every)))
    return known.pop() if len(known) == 1 else None


def _counters(optimizer: Any) -> list[Any]:
    """`every` of our `multi_steps` and optax's `MultiSteps`, also where a chain or masks close over them.

    Optax has no way to ask a chain for its parts: what its functions close over is followed.
    """
    found, todo, seen = [], [optimizer], set()
    while todo:
        each = todo.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if type(each).__name__ == "MultiSteps":
            found.append(getattr(each, "every", None) or _compat.every_of_optax(each))
        elif isinstance(each, Mapping):
            todo += each.values()
        elif isinstance(each, tuple | list):
            todo += each
        elif isinstance(each, functools.partial):
            todo += [each.func, *each.args, *each.keywords.values()]
        elif isinstance(each, types.MethodType):
            todo.append(each.__self__)
        elif isinstance(each, types.FunctionType):
            todo += inspect.getclosurevars(each).nonlocals.values()
    return found


def _emptied(names: Iterable[str], path: str) -> list[str]:
    at = _at(path)
    return [name for name in names if name.startswith(at) and name.removeprefix(at).split("/")[0] in _EMPTIED]


def _bookkeeping(names: Iterable[str], path: str) -> list[str]:
    return [*_emptied(names, path), _at(path) + "mini_step", _at(path) + "gradient_step"]


def _at(path: str) -> str:
    return path + "/" if path else ""


def _said(path: str) -> str:
    return path or "the optimizer's state"
