"""What the arguments of a program hold, as the types of their containers tell: flax's, optax's and nnx's states."""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey

from jaxmem._flax import is_a

# What linen modules call their collections; a dictionary of these is the variables of a module.
_COLLECTIONS = frozenset(
    {"batch_stats", "cache", "constants", "fp8_params", "intermediates", "losses", "perturbations", "spectral_stats"}
    | {"params", "_overwrite_with_gradient"}
)
# Of a program that holds parameters: arguments of these names are its batch.
_BATCH = ("batch", "images", "inputs", "labels", "targets", "tokens", "x", "y")


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """A container that can be nothing but training state: an output of its type is its next value.

    Args:
      type: of the container.
      leaves: path of a leaf below it → number of the leaf in the whole tree.
    """

    type: type
    leaves: Mapping[str, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recognised:
    """What a tree of arguments or of outputs holds.

    Args:
      kinds: of each leaf, one of `KINDS`; "arguments" where nothing tells.
      states: the outermost containers of training state, in order.
    """

    kinds: tuple[str, ...]
    states: tuple[State, ...] = ()


def recognise(tree: Any) -> Recognised:
    """What the types of a tree's containers tell.

    A container with a field `params` and one that holds optimizer state, such as flax's `TrainState`, is a training
    state: its other fields are "state". A named tuple of optax is optimizer state. A `Variable` of nnx says by its type
    what it is. A dictionary of linen's collections is the variables of a module. Other containers tell nothing.

    >>> import jax.numpy as jnp, optax
    >>> recognise((optax.adam(0.1).init({"w": jnp.ones(2)}), jnp.ones(3))).kinds
    ('optimizer_state', 'optimizer_state', 'optimizer_state', 'arguments')
    >>> recognise([{"params": {"w": 1.0}, "batch_stats": {"mean": 0.0}}]).kinds
    ('state', 'parameters')
    """
    kinds: list[str] = []
    states: list[State] = []
    _walk(tree, "", False, kinds, states)
    return Recognised(kinds=tuple(kinds), states=tuple(states))


def recognise_arguments(args_info: Any, names: Sequence[str]) -> Recognised:
    """What the arguments of a program hold.

    Beside what `recognise` tells: the argument with the tree and the shapes of what the optimizer's state keeps for
    each parameter is the parameters, as is one of the name `params` beside an optimizer's state. What the names of the
    others say of a batch counts where there are parameters.

    Args:
      args_info: `((argument, …), {keyword: argument})` of a `jax.stages.Traced`, `Lowered` or `Compiled`.
      names: of the arguments, those by keyword last.
    """
    found = recognise(args_info)
    kinds, at = list(found.kinds), 0
    kept = _trees_in_optimizers(args_info)
    spans: list[tuple[str, Any, slice]] = []
    for name, argument in zip(names, [*args_info[0], *args_info[1].values()], strict=True):
        count = len(jax.tree.leaves(argument))
        if count and set(kinds[at : at + count]) == {"arguments"}:
            spans.append((name, argument, slice(at, at + count)))
        at += count
    if "optimizer_state" in kinds and "parameters" not in kinds:
        alike = [span for span in spans if _shape_of(span[1]) in kept]
        named = [span for span in alike or spans if span[0] == "params"]
        if len(chosen := named or alike) == 1:
            where = chosen[0][2]
            kinds[where] = ["parameters"] * (where.stop - where.start)
            spans.remove(chosen[0])
    if "parameters" in kinds:
        for where in (where for name, _, where in spans if name in _BATCH):
            kinds[where] = ["batch"] * (where.stop - where.start)
    return Recognised(kinds=tuple(kinds), states=found.states)


def _walk(node: Any, kind: str, within: bool, kinds: list[str], states: list[State]) -> None:
    """Adds a tree's leaves and states; leaves are of `kind`, where a container round the tree tells it.

    `within`: the tree is part of a state, so that no container in it is a state of its own.
    """
    children = _children(node)
    if children is None:
        kinds.append(kind or "arguments")
        return
    first, kind = len(kinds), kind or _kind_of_type(node)
    fields = {_name(key): child for key, child in children}
    record = _kinds_of_record(children, fields)
    of_graph = _kinds_of_graph(node)
    is_state = bool(record) or of_graph is not None or _is_optimizer_state(node)
    if of_graph is not None:
        kinds += of_graph
    else:
        own = _kinds_of_fields(fields, kind, record)
        for key, child in children:
            _walk(child, own.get(_name(key), own.get("", kind)), within or is_state, kinds, states)
    if is_state and not within:
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(node)]
        states.append(State(type=type(node), leaves={path: first + n for n, path in enumerate(paths)}))


def _children(node: Any) -> list[tuple[Any, Any]] | None:
    """(key, child) pairs of a container; None for a leaf."""
    found = jax.tree_util.tree_leaves_with_path(node, is_leaf=lambda each: each is not node)
    if len(found) == 1 and not found[0][0]:
        return None
    return [(path[0], child) for path, child in found]


def _name(key: Any) -> str:
    return str(getattr(key, "name", getattr(key, "key", getattr(key, "idx", key))))


def _kinds_of_record(children: list[tuple[Any, Any]], fields: Mapping[str, Any]) -> dict[str, str]:
    """Kinds of a training state's fields; none of anything else.

    It has parameters and what optax keeps for them, or is a record with the usual names; a dictionary may be anything.
    """
    if "params" not in fields:
        return {}
    others = {name: child for name, child in fields.items() if name != "params"}
    held = [name for name, child in others.items() if "optimizer_state" in recognise(child).kinds]
    if not held and "opt_state" in fields and not any(isinstance(key, DictKey) for key, _ in children):
        held = ["opt_state"]
    return {"params": "parameters", **dict.fromkeys(held, "optimizer_state"), "": "state"} if held else {}


def _kinds_of_fields(fields: Mapping[str, Any], kind: str, record: dict[str, str]) -> dict[str, str]:
    """Kinds by field, and under "" that of all others, where they are not those of the container."""
    if record:
        return record
    if kind == "optimizer_state":
        return {"acc_grads": "accumulators"}
    of_linen = isinstance(fields.get("params"), Mapping) and fields.keys() <= _COLLECTIONS
    return {"params": "parameters", "": "state"} if of_linen and kind in ("", "parameters") else {}


def _kind_of_type(node: Any) -> str:
    if _is_optimizer_state(node):
        return "optimizer_state"
    cls = type(node)
    if is_a(cls, "flax.nnx", "Param") or (cls.__module__.startswith("optax") and cls.__name__ == "LookaheadParams"):
        return "parameters"
    return "state" if is_a(cls, "flax.nnx", "Variable") else ""


def _is_optimizer_state(node: Any) -> bool:
    cls = type(node)
    if cls.__module__.partition(".")[0] == "optax":
        return hasattr(cls, "_fields") and not cls.__name__.endswith("Params")
    return is_a(cls, "flax.nnx", "OptState")


def _kinds_of_graph(node: Any) -> list[str] | None:
    """Kinds of the leaves of what `nnx.jit` makes of a module or an optimizer; None for anything else."""
    if not _is_graph(node):
        return None
    found = _in_graph(node)
    count = len(jax.tree.leaves(node))
    return ["arguments"] * count if found is None else list(recognise(found).kinds)


def _is_graph(node: Any) -> bool:
    return type(node).__name__ == "NodeStates" and type(node).__module__.startswith("flax.nnx")


def _in_graph(node: Any) -> Any | None:
    """The nnx object of a graph and its states, with the number of each leaf in its place; None where it has others."""
    nnx: Any = sys.modules["flax.nnx"]
    leaves, tree = jax.tree.flatten(node)
    numbered = jax.tree.unflatten(tree, range(len(leaves)))
    try:
        found = nnx.merge(numbered.graphdef, *numbered.states)
    except Exception:  # flax's own form of a graph, which it may change: nothing is told then
        return None
    return found if jax.tree.leaves(found) == list(range(len(leaves))) else None


def paths_of_leaves(tree: Any) -> list[str]:
    """The path of each leaf; in what `nnx.jit` makes of an object the one that the object has for it.

    >>> paths_of_leaves({"w": 1.0, "b": [2.0]})
    ["['b'][0]", "['w']"]
    """
    paths = []
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_graph):
        found = _in_graph(node) if _is_graph(node) else None
        inner = jax.tree_util.tree_leaves_with_path(node if found is None else found)
        below = [jax.tree_util.keystr(each) for each, _ in inner]
        start = jax.tree_util.keystr(path)
        paths += [start + (name if found is None else name.removesuffix(".value")) for name in below]
    return paths


def _shape_of(tree: Any) -> Any:
    """The structure of a tree with the shapes of its leaves."""
    return jax.tree.structure(tree), tuple(tuple(leaf.shape) for leaf in jax.tree.leaves(tree))


def _trees_in_optimizers(tree: Any) -> set[Any]:
    """The trees that optimizer states hold as a whole, such as the moments of all parameters."""
    nodes, _ = jax.tree.flatten(tree, is_leaf=_is_optimizer_state)
    held: set[Any] = set()
    for node in (node for node in nodes if _is_optimizer_state(node)):
        for _, child in _children(node) or ():
            if any(leaf.shape for leaf in jax.tree.leaves(child)):  # a count is like any other number
                held |= {_shape_of(child)} | _trees_in_optimizers(child)
    return held
