"""What may differ between shards that accumulate locally, and what would then be ambiguous."""

from typing import Any

import jax

from jaxmem._compat import called_jaxprs
from jaxmem.accumulate._reduce import is_metric
from jaxmem.accumulate._shards import Shards, is_key
from jaxmem.accumulate._trace import TracedLoss
from jaxmem.errors import MetricError, ObjectiveError, StateError
from jaxmem.objective import Last
from jaxmem.workload import path_string


def check_local(traced: TracedLoss, state: Any, names: Any, shards: Shards) -> None:
    """Refuses what shards that know nothing of one another cannot compute.

    Raises:
      StateError: state that is carried, or of which the last value is wanted, and that depends on the rows or on
        random numbers, so that every shard comes to another. MetricError: likewise a `Last`. ObjectiveError: a loss
        that speaks with the other shards by itself.
    """
    _check_collectives(traced, shards)
    differs = _differing_state(traced, state, names)
    leaves = zip(
        jax.tree_util.tree_leaves_with_path(state), jax.tree.leaves(names), jax.tree.leaves(differs), strict=True
    )
    for (path, leaf), name, differ in leaves:
        if not differ or name not in ("carry", "last"):
            continue
        if is_key(leaf) and _passed_on(traced, state, path):
            continue
        raise StateError(
            wanted="state that shards which accumulate locally can combine",
            got=f"{name!r} for {path_string(path, root='state')}, which every shard would change in its own way",
            do="Declare state_reduction 'mean', 'sum' or 'max' for it, or reduce gradients every micro-batch "
            "(gradient_reduction='each', no data_sharding).",
        )
    for path, metric in jax.tree_util.tree_leaves_with_path(traced.out_shapes.metrics, is_leaf=is_metric):
        if isinstance(metric, Last) and _depends(traced, lambda micro, path=path: _at(micro.metrics, path), differs):
            raise MetricError(
                wanted="metrics that shards which accumulate locally can combine: WeightedMean, Sum or Max",
                got=f"a Last of the rows at {path_string(path, root='metrics')}: none of the shards is the last",
                do="Declare another kind, or reduce gradients every micro-batch (gradient_reduction='each').",
            )


def shard_state(state: Any, index: Any) -> Any:
    """The state as one shard sees it: keys with its index folded in, so that shards draw different numbers."""
    if index is None:
        return state
    return jax.tree.map(lambda leaf: _fold(leaf, index) if is_key(leaf) else leaf, state)


def shard_key(rng: Any, index: Any) -> Any:
    """The step's key as one shard uses it."""
    return rng if rng is None or index is None else jax.random.fold_in(rng, index)


def _fold(keys, index):
    fold = jax.random.fold_in
    for _ in range(keys.ndim):
        fold = jax.vmap(fold, (0, None))
    return fold(keys, index)


def _differing_state(traced: TracedLoss, state: Any, names: Any) -> Any:
    """Which leaves of the state come to differ between shards: tree of bools."""
    leaves, tree = jax.tree.flatten(state)
    carried = [name == "carry" for name in jax.tree.leaves(names)]
    differs = [is_key(leaf) for leaf in leaves]
    needs = [traced.cut(lambda micro, i=i: jax.tree.leaves(micro.state)[i])[1] for i in range(len(leaves))]
    while True:
        # A leaf that is not carried is seen by every micro-batch as it was at the start.
        seen = [is_key(leaf) or (d and c) for leaf, d, c in zip(leaves, differs, carried, strict=True)]
        found = [
            own or any(jax.tree.leaves(batch)) or any(jax.tree.leaves(rng)) or _any_of(jax.tree.leaves(needed), seen)
            for own, (_, batch, rng, needed) in zip(differs, needs, strict=True)
        ]
        if found == differs:
            return tree.unflatten(differs)
        differs = found


def _any_of(needed: list, seen: list) -> bool:
    return any(a and b for a, b in zip(needed, seen, strict=True))


def _depends(traced: TracedLoss, select, differs: Any) -> bool:
    """Whether outputs depend on what differs between shards."""
    _, (_, batch, rng, state) = traced.cut(select)
    return any(jax.tree.leaves((batch, rng))) or _any_of(jax.tree.leaves(state), jax.tree.leaves(differs))


def _passed_on(traced: TracedLoss, state: Any, path: Any) -> bool:
    """Whether the loss returns this leaf of the state as it was given."""
    position = [p for p, _ in jax.tree_util.tree_leaves_with_path(state)].index(path)
    jaxpr = traced.jaxpr.jaxpr
    marks = jax.tree.unflatten(traced.out_tree, list(range(len(jaxpr.outvars))))
    out = jaxpr.outvars[jax.tree.leaves(marks.state)[position]]
    first = len(jaxpr.invars) - len(jax.tree.leaves(state))
    return out is jaxpr.invars[first + position]


def _at(metrics: Any, path: Any) -> Any:
    found = dict(jax.tree_util.tree_leaves_with_path(metrics, is_leaf=is_metric))
    return found[path]


def _check_collectives(traced: TracedLoss, shards: Shards) -> None:
    todo, seen = [traced.jaxpr.jaxpr], set()
    while todo:
        jaxpr = todo.pop()
        if id(jaxpr) in seen:
            continue
        seen.add(id(jaxpr))
        for eqn in jaxpr.eqns:
            named = eqn.params.get("axes", ()), eqn.params.get("axis_name", ())
            for names in named:
                names = names if isinstance(names, (tuple, list)) else (names,)
                spoken = [name for name in names if isinstance(name, str) and name in shards.axes]
                if spoken:
                    raise ObjectiveError(
                        wanted="a loss of its own rows, since shards accumulate locally",
                        got=f"{eqn.primitive.name} over {', '.join(map(repr, spoken))} in the loss",
                        do="Leave the collective out: totals and weights are summed over the shards for you.",
                    )
            todo += called_jaxprs(eqn)
