"""Why the leaves of a checkpoint are probably not those of a tree, and what to do."""

import collections
import dataclasses
import itertools
import operator
import re
from collections.abc import Iterable, Mapping

from jaxmem.checkpoint._leaves import Leaf

OPTIMIZER, LOSS_SCALE = "opt_state", "loss_scale"


@dataclasses.dataclass(kw_only=True)
class Differences:
    """What does not fit, by name.

    Args:
      missing: in the checkpoint, as wanted.
      unwanted: in the checkpoint, as saved.
      shapes, dtypes, keys: as saved and as wanted, of leaves that differ in one of these.
      castable: the names in `dtypes` that `cast` could convert.
    """

    missing: dict[str, Leaf] = dataclasses.field(default_factory=dict)
    unwanted: dict[str, Leaf] = dataclasses.field(default_factory=dict)
    shapes: dict[str, tuple[Leaf, Leaf]] = dataclasses.field(default_factory=dict)
    dtypes: dict[str, tuple[Leaf, Leaf]] = dataclasses.field(default_factory=dict)
    keys: dict[str, tuple[Leaf, Leaf]] = dataclasses.field(default_factory=dict)
    castable: set[str] = dataclasses.field(default_factory=set)

    def __bool__(self) -> bool:
        return any((self.missing, self.unwanted, self.shapes, self.dtypes, self.keys))


def likely_cause(found: Differences, num_fitting: int) -> str:
    """What probably happened, and what to do, in a few sentences.

    Args:
      found: what does not fit.
      num_fitting: leaves of the tree that do fit.
    """
    missing, unwanted = (
        {name: leaf for name, leaf in leaves.items() if not is_below(name, LOSS_SCALE)}
        for leaves in (found.missing, found.unwanted)
    )
    said = []
    if len(missing) < len(found.missing):
        said.append("A loss scale was turned on: restore with the precision that the checkpoint was saved with.")
    elif len(unwanted) < len(found.unwanted):
        said.append("The loss scale was turned off: restore with the precision that the checkpoint was saved with.")
    if missing or unwanted or found.shapes:
        said.append(
            _a_part(missing, unwanted, found.shapes)
            or _scanned(missing, unwanted)
            or _other_optimizer([*missing, *unwanted, *found.shapes])
            or _renamed(missing, unwanted)
            or _other_model(len(missing) + len(unwanted) + len(found.shapes), num_fitting)
        )
    if found.castable:
        said.append(_cast(found.castable))
    if found.keys:
        said.append("Make keys of the implementation they were saved with: jax.random.key(0, impl=...).")
    return " ".join(said) or "Restore into the dtypes of the checkpoint, and convert afterwards."


def _cast(names: set[str]) -> str:
    first = sorted({name.split("/")[0] for name in names})
    why = "The optimizer's state is kept in another dtype" if first == [OPTIMIZER] else "No dtype is changed unasked"
    return f"{why}: to convert, give cast={(first[0] if len(first) == 1 else tuple(first))!r}."


def _a_part(missing: Mapping[str, Leaf], unwanted: Mapping[str, Leaf], shapes: Iterable[str]) -> str:
    """The tree is one part of what was saved, such as the parameters alone, under its own names or those below it."""
    if not missing and not shapes and not {"step", "window"}.isdisjoint(unwanted):
        return "To restore a part, such as tree['params'], pass that part alone, and only='params'."
    for part in dict.fromkeys(name.partition("/")[0] for name in unwanted if missing):
        if all(unwanted.get(f"{part}/{name}") == leaf for name, leaf in missing.items()):
            return f"The tree is what lies below {part} in the checkpoint: give only={part!r}."
    return ""


def _scanned(missing: Mapping[str, Leaf], unwanted: Mapping[str, Leaf]) -> str:
    """A scanned model where an unrolled one was saved, or the other way round: L arrays in one with an axis of L."""
    for one, other, said in (
        (missing, unwanted, "The checkpoint is of an unrolled model and the tree of a scanned one"),
        (unwanted, missing, "The checkpoint is of a scanned model and the tree of an unrolled one"),
    ):
        layers = collections.defaultdict(list)
        for each, leaf in other.items():
            layers[re.sub(r"\d+", "#", each), leaf].append(each)
        stacks = {(_last(each[0]), leaf, len(each)): each[0] for (_, leaf), each in layers.items() if len(each) > 1}
        for name, stacked in sorted(one.items(), key=lambda item: is_below(item[0], OPTIMIZER)):
            for axis, size in enumerate(stacked.shape):
                if part := stacks.get((_last(name), _without(stacked, axis), size)):
                    return (
                        f"{said}: {name} holds {size} arrays such as {part}. Restore into a model of the same kind, "
                        "and stack or split its layers."
                    )
    return ""


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _without(leaf: Leaf, axis: int) -> Leaf:
    return dataclasses.replace(leaf, shape=leaf.shape[:axis] + leaf.shape[axis + 1 :])


def _renamed(missing: Mapping[str, Leaf], unwanted: Mapping[str, Leaf]) -> str:
    """Each missing leaf has one of its shape and dtype that nothing wants; parameters say it for their moments."""
    if not missing or collections.Counter(missing.values()) != collections.Counter(unwanted.values()):
        return ""
    names = [name for name in missing if not is_below(name, OPTIMIZER)] or list(missing)
    pairs, free = [], dict(unwanted)
    for name in names[:3]:
        alike = [other for other, leaf in free.items() if leaf == missing[name]]
        close = max(alike, key=lambda other: _num_shared(name, other))
        del free[close]
        pairs.append(f"{name} may be what was saved as {close}")
    more = f", and {len(names) - 3} more likewise" if len(names) > 3 else ""
    return f"Renamed? {', '.join(pairs)}{more}: restore under the names of the checkpoint, and rename afterwards."


def _num_shared(one: str, other: str) -> int:
    """Letters at the beginnings and at the ends of two names that are the same."""
    pairs = (map(operator.eq, one, other), map(operator.eq, reversed(one), reversed(other)))
    return sum(sum(itertools.takewhile(bool, pair)) for pair in pairs)


def _other_optimizer(names: Iterable[str]) -> str:
    if not all(is_below(name, OPTIMIZER) for name in names):
        return ""
    return "Only the optimizer's state differs: restore with the optimizer that the checkpoint was saved with."


def _other_model(num_misfits: int, num_fitting: int) -> str:
    if num_misfits > num_fitting:
        return "It is probably of another model: choose another folder, or the model that it was saved with."
    return "Make the tree with the model, optimizer and config that the checkpoint was saved with."


def is_below(name: str, part: str) -> bool:
    """Whether a name has this part."""
    return part in name.split("/")
