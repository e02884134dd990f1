"""Whether shards of a batch may accumulate their gradients by themselves, found out from the programs of the loss."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxmem._compat import prune
from jaxmem.accumulate._reduce import is_metric
from jaxmem.accumulate._row_rules import RULES
from jaxmem.accumulate._rows import CLEAN, UNIFORM, Follower, Value, rows, worst
from jaxmem.accumulate._split import Split
from jaxmem.accumulate._trace import TracedLoss
from jaxmem.errors import MetricError, ObjectiveError
from jaxmem.objective import Last, Max, WeightedMean
from jaxmem.workload import path_string

_GRADIENT = "the gradient of the objective"
_NO_SUM = "it is no sum or mean over rows"
_NO_ROW = "what belongs to no row, which every shard would add"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Independence:
    """What is known of a loss.

    Args:
      verdict: "yes", its value, gradients and metrics are the same however the rows are dealt out; "no", rows know of
        one another; "unknown" otherwise.
      why: in a few words, unless "yes".
    """

    verdict: Literal["yes", "no", "unknown"]
    why: str = ""


def independent_rows(
    loss_fn: Any, params: Any, batch: Any, *, rng: Any = None, state: Any = None, batch_axes: Any = 0, parts: int = 2
) -> Independence:
    """Whether a loss comes to the same however the rows of the batch are dealt out to parts of equal size.

    The loss is traced on the batch and on one part of it, and so are its gradients, in which custom derivative rules
    count as they are. Metrics are looked at too: by their kinds, parts must combine to what the batch gives.

    Args:
      params: what is differentiated; of floating dtype.
      batch: of at least as many rows as parts; arrays or shapes.
      batch_axes: as in `value_and_grad`.
      parts: how many.

    >>> import jax.numpy as jnp
    >>> independent_rows(lambda w, x: ((x * w) ** 2).mean(), jnp.ones(()), jnp.ones(8)).verdict
    'yes'
    >>> independent_rows(lambda w, x: ((x - x.mean()) * w).mean(), jnp.ones(()), jnp.ones(8))
    Independence(verdict='no', why='sub of a row with a sum over rows')
    """
    split = Split.of(batch, 1, batch_axes=batch_axes, pad=None)
    if jax.tree.leaves(state):
        return Independence(verdict="unknown", why="it has model state")
    if split.size % parts:
        cut = "halved" if parts == 2 else f"dealt out to {parts} parts"
        return Independence(verdict="unknown", why=f"{split.size} rows cannot be {cut}")
    try:
        part = jax.eval_shape(lambda b: Split.of(b, parts, batch_axes=batch_axes, pad=None).take(b, 0), batch)
        found = _inquire(loss_fn, (params, part, rng, state), split.axes, parts)
    except Exception as error:  # whatever a loss does on fewer rows, or this does not understand
        return Independence(verdict="unknown", why=f"it could not be followed: {' '.join(str(error).split())[:200]}")
    stages = [[f for _, where, f in found if (where == _GRADIENT) == last] for last in (False, True)]
    bad = (f for stage in stages for verdict in ("no", "unknown") for f in stage if f.verdict == verdict)
    return next(bad, Independence(verdict="yes"))


def check_rows_apart(loss_fn: Any, args: tuple, axes: tuple[int | None, ...], parts: int) -> None:
    """Refuses a loss in whose value, gradients or metrics rows are seen to know of one another; the unknown passes.

    Args:
      args: (params, batch, rng, state) of one of the shards.
      axes: the example axis of each leaf of the batch, None leaves included.
      parts: how many shards.

    Raises:
      ObjectiveError, MetricError: it does.
    """
    try:
        try:
            found, sure = _inquire(loss_fn, args, axes, parts), True
        except Exception:  # a loss made for so many rows and no others: nothing is known of numbers of rows
            found, sure = _inquire(loss_fn, args, axes, 1), False
    except Exception:  # JAX has more to say about it when the loss is differentiated
        return
    for error, where, independence in found:
        if independence.verdict == "no" and (sure or independence.why != _NO_ROW):
            raise error(
                wanted="a loss whose rows know nothing of one another, since every shard sees its own rows only",
                got=f"{independence.why} in {where}",
                do="Reduce gradients every micro-batch (gradient_reduction='each', no data_sharding), or declare how "
                "shards combine such statistics: state_reduction 'mean', 'sum' or 'max'.",
            )


class _Programs:
    """A loss as the programs of its weights, and of its terms, metrics and gradients as they are differentiated."""

    def __init__(self, loss_fn, params, batch, rng, state):
        args = (params, batch, rng, state)
        traced = TracedLoss.of(loss_fn, *args)
        self.in_tree, terms = traced.in_tree, traced.out_shapes.terms
        self.rules = [term.rule for term in terms]
        self.weights, self.weights_need = traced.pruned(lambda micro: [term.weight for term in micro.terms])

        def differentiated(seeds, params, *rest):
            def objective(params):
                micro = traced(params, *rest)
                totals = [seed * term.total.astype(seed.dtype) for seed, term in zip(seeds, micro.terms, strict=True)]
                return sum(totals), (micro.terms, micro.metrics)

            return jax.grad(objective, has_aux=True)(params)

        dtypes = [jnp.promote_types(term.total.dtype, jnp.float32) for term in terms]
        seeds = [jax.ShapeDtypeStruct((), dtype) for dtype in dtypes]
        closed, shapes = jax.make_jaxpr(differentiated, return_shape=True)(seeds, *args)
        self.out_tree = jax.tree.structure(shapes)
        self.gradients, self.gradients_need = prune(closed, [True] * len(closed.out_avals))


def _inquire(loss_fn: Any, args: tuple, axes: tuple, parts: int) -> list[tuple[type, str, Independence]]:
    """(class of the error, where, what is known) of each term, metric and gradient.

    Args:
      args: (params, batch, rng, state) of one part.
    """
    params, batch, rng, state = args

    def repeated(times, batch):
        leaves, tree = jax.tree.flatten(batch, is_leaf=lambda x: x is None)
        pairs = zip(leaves, axes, strict=True)
        return tree.unflatten(x if axis is None else jnp.concatenate([x] * times, axis) for x, axis in pairs)

    (size,) = {leaf.shape[axis] for leaf, axis in _leaves(batch, axes) if axis is not None}
    least = 2 if size == 1 else 1  # an axis of one row is squeezed and broadcast as no other is
    batches = [jax.eval_shape(functools.partial(repeated, times), batch) for times in (least * parts, least)]
    whole, part = (_Programs(loss_fn, params, b, rng, state) for b in batches)
    return list(_findings(whole, part, [CLEAN if a is None else rows(a) for _, a in _leaves(batch, axes)], parts))


def _leaves(batch: Any, axes: tuple) -> list[tuple[Any, int | None]]:
    """(leaf, example axis) without the leaves that are None."""
    leaves = jax.tree.leaves(batch, is_leaf=lambda x: x is None)
    return [(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True) if leaf is not None]


def _findings(
    whole: _Programs, part: _Programs, of_batch: list[Value], parts: int
) -> Iterator[tuple[type, str, Independence]]:
    params, _, rng, state = jax.tree.unflatten(whole.in_tree, range(whole.in_tree.num_leaves))
    given = [*[CLEAN] * len(jax.tree.leaves(params)), *of_batch, *[CLEAN] * len(jax.tree.leaves((rng, state)))]
    follow, count = Follower(parts, RULES), len(whole.rules)

    def doubt(why):
        return ObjectiveError, "the loss", Independence(verdict="unknown", why=why)

    if whole.weights_need != part.weights_need or whole.gradients_need != part.gradients_need:
        yield doubt("it depends on the number of rows")
        return
    if any(whole.weights_need[i] or whole.gradients_need[count + i] for i in jax.tree.leaves(rng)):
        yield doubt("it draws random numbers")
    needed = [value for value, need in zip(given, whole.weights_need, strict=True) if need]
    weights = iter(follow.outputs(whole.weights, part.weights, needed))
    seeds = [_seed(rule, next(weights) if rule == "weighted" else None) for rule in whole.rules]
    needed = [value for value, need in zip([*seeds, *given], whole.gradients_need, strict=True) if need]
    found = follow.outputs(whole.gradients, part.gradients, needed)
    gradients, (terms, metrics) = jax.tree.unflatten(whole.out_tree, found)
    plain = True
    for i, (term, seed) in enumerate(zip(terms, seeds, strict=True)):
        values = [term.total] if term.weight is None else [term.total, term.weight]
        good = term.total.zero or term.total.grown + seed.degree == 1
        known = _known(values, good)
        if term.factor.degree:
            known = Independence(verdict="no", why="a factor that depends on the number of rows")
        elif term.factor.kind != "clean":
            known = Independence(verdict="unknown", why=term.factor.why)
        plain &= known.verdict == "yes"
        yield ObjectiveError, f"objective term {i}", known
    for path, metric in jax.tree_util.tree_leaves_with_path(metrics, is_leaf=is_metric):
        where = path_string(path, root="metrics")
        yield MetricError, where, _metric(metric, where)
    for value in jax.tree.leaves(gradients):
        if plain and value.of_sum:  # a derivative rule of its own, since that of a sum over rows is linear in each
            value = value.with_(kind="mixed")
        yield ObjectiveError, _GRADIENT, _known([value], value.zero or value.grown == 1)


def _seed(rule: str, weight: Value | None) -> Value:
    """What a term's total is multiplied by before it is differentiated.

    One over the total weight; a mean of the rows of a part counts as much less as there are parts.
    """
    return UNIFORM.with_(degree={"mean": 1, "sum": 0}[rule] if weight is None else 1 - weight.grown)


def _metric(metric, where: str) -> Independence:
    """Whether the metrics of parts combine to that of the whole."""
    values = jax.tree.leaves(metric)
    if isinstance(metric, WeightedMean):
        return _known(values, metric.total.zero or metric.total.grown == metric.weight.grown)
    (value,) = values
    if isinstance(metric, Max) and value.kind == "largest":
        return Independence(verdict="yes")
    if isinstance(metric, Last) and value.kind != "clean":
        return Independence(verdict="unknown", why=f"a Last of the rows at {where}")
    return _known(values, value.zero or value.grown == (0 if isinstance(metric, (Max, Last)) else 1))


def _known(values: list[Value], good: bool) -> Independence:
    if bad := worst(values):
        return Independence(verdict="no" if bad.kind == "mixed" else "unknown", why=bad.why)
    if any(value.kind == "rows" for value in values):
        return Independence(verdict="unknown", why="a value of one row")
    if good:
        return Independence(verdict="yes")
    return (
        Independence(verdict="no", why=_NO_ROW)
        if values[0].kind == "clean"
        else Independence(verdict="unknown", why=_NO_SUM)
    )
