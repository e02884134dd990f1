"""What local accumulation refuses: batches, parameters and losses for which shards cannot work by themselves."""

from typing import Any

import jax
from jax.core import Tracer

from jaxmem._compat import called_jaxprs
from jaxmem.accumulate._reduce import is_metric
from jaxmem.accumulate._shards import Shards, axis_names, is_key
from jaxmem.accumulate._split import Split
from jaxmem.accumulate._trace import TracedLoss
from jaxmem.errors import BatchError, ConfigError, MetricError, ObjectiveError, StateError
from jaxmem.objective import Last
from jaxmem.workload import path_string


def check_rows(shards: Shards, split: Split, num_micro_batches: int) -> None:
    """BatchError unless shards × micro-batches divide the rows of the batch."""
    each = shards.count * (1 if any(fill is not None for fill in split.fills) else num_micro_batches)
    if split.size % each:
        raise BatchError(
            wanted=f"a batch that shards x micro-batches ({shards.count} x {num_micro_batches}) divide",
            got=f"B={split.size} rows",
            do=f"Use a batch size that is a multiple of {each}, or fewer micro-batches.",
        )


def check_params(shards: Shards, params: Any) -> None:
    """ConfigError if a parameter is known to be sharded over the axes of the batch."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        own = jax.typeof(leaf) if isinstance(leaf, Tracer) else leaf
        spec = getattr(getattr(own, "sharding", None), "spec", ())
        taken = [name for entry in spec for name in axis_names(entry or ()) if name in shards.axes]
        if taken:
            raise ConfigError(
                wanted="parameters that every shard of the batch holds whole, to accumulate their gradients locally",
                got=f"{path_string(path, root='params')} sharded over {', '.join(map(repr, taken))}",
                do="Reduce every micro-batch: leave data_sharding out, or set gradient_reduction='each'.",
            )


def check_local(traced: TracedLoss, state: Any, names: Any, shards: Shards) -> None:
    """Refuses a loss whose state, metrics or objective shards cannot compute without one another.

    Raises:
      StateError: a leaf with reduction "carry" or "last" depends on the rows or on random numbers, so that shards
        disagree about it.
      MetricError: the same of a `Last` metric.
      ObjectiveError: the loss contains a collective over the shards.
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
            wanted="state that can be combined over shards that accumulate locally",
            got=f"{name!r} for {path_string(path, root='state')}, which every shard would change in its own way",
            do="Declare state_reduction 'mean', 'sum' or 'max' for it, or reduce gradients every micro-batch "
            "(gradient_reduction='each', no data_sharding).",
        )
    metrics = jax.tree_util.tree_leaves_with_path(traced.out_shapes.metrics, is_leaf=is_metric)
    for i, (path, metric) in enumerate(metrics):
        select = lambda micro, i=i: jax.tree.leaves(micro.metrics, is_leaf=is_metric)[i]  # noqa: E731
        if isinstance(metric, Last) and _depends(traced, select, differs):
            raise MetricError(
                wanted="metrics that can be combined over shards that accumulate locally: WeightedMean, Sum or Max",
                got=f"a Last of the rows at {path_string(path, root='metrics')}: none of the shards is the last",
                do="Declare another kind, or reduce gradients every micro-batch (gradient_reduction='each').",
            )


def _differing_state(traced: TracedLoss, state: Any, names: Any) -> Any:
    """Which leaves of the state differ between shards after the batch: a tree of bools."""
    leaves, tree = jax.tree.flatten(state)
    carried = [name == "carry" for name in jax.tree.leaves(names)]
    differs = [is_key(leaf) for leaf in leaves]
    needs = [traced.cut(lambda micro, i=i: jax.tree.leaves(micro.state)[i])[1] for i in range(len(leaves))]
    while True:
        # Every micro-batch sees the initial value of a leaf that is not carried.
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
    """Whether outputs depend on the batch, on random numbers or on state that differs between shards."""
    _, (_, batch, rng, state) = traced.cut(select)
    return any(jax.tree.leaves((batch, rng))) or _any_of(jax.tree.leaves(state), jax.tree.leaves(differs))


def _passed_on(traced: TracedLoss, state: Any, path: Any) -> bool:
    """Whether the loss returns this leaf of the state unchanged."""
    position = [p for p, _ in jax.tree_util.tree_leaves_with_path(state)].index(path)
    jaxpr = traced.jaxpr.jaxpr
    marks = jax.tree.unflatten(traced.out_tree, list(range(len(jaxpr.outvars))))
    out = jaxpr.outvars[jax.tree.leaves(marks.state)[position]]
    first = len(jaxpr.invars) - len(jax.tree.leaves(state))
    return out is jaxpr.invars[first + position]


def _check_collectives(traced: TracedLoss, shards: Shards) -> None:
    todo, seen = [traced.jaxpr.jaxpr], set()
    while todo:
        jaxpr = todo.pop()
        if id(jaxpr) in seen:
            continue
        seen.add(id(jaxpr))
        for eqn in jaxpr.eqns:
            for names in (eqn.params.get("axes", ()), eqn.params.get("axis_name", ())):
                names = names if isinstance(names, (tuple, list)) else (names,)
                reduced = [name for name in names if isinstance(name, str) and name in shards.axes]
                if reduced:
                    raise ObjectiveError(
                        wanted="a loss of the shard's own rows, since shards accumulate locally",
                        got=f"{eqn.primitive.name} over {', '.join(map(repr, reduced))} in the loss",
                        do="Leave the collective out: totals and weights are summed over the shards for you.",
                    )
            todo += called_jaxprs(eqn)
