"""Whether a loss is separable by rows, so that shards of a batch may accumulate their gradients locally."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxmem._compat import prune
from jaxmem._shown import Brief
from jaxmem.accumulate._reduce import is_metric
from jaxmem.accumulate._split import Split
from jaxmem.accumulate._trace import TracedLoss
from jaxmem.accumulate.separability._interpreter import RowInterpreter
from jaxmem.accumulate.separability._row_values import CLEAN, UNIFORM, Value, rows, worst
from jaxmem.accumulate.separability._rules import RULES
from jaxmem.errors import MetricError, ObjectiveError
from jaxmem.objective import Last, Max, WeightedMean
from jaxmem.workload import path_string

_GRADIENT = "the gradient of the objective"
_NO_SUM = "it is no sum or mean over rows"
_NO_ROW = "a term that belongs to no row, which every shard would add"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Separability(Brief):
    """Whether the rows of a batch can be dealt out to parts without changing a loss.

    Args:
      verdict: "yes", its value, gradients and metrics stay the same; "no", the result of one row depends on other rows;
        "unknown" otherwise.
      why: the reason in a few words; empty for "yes".
    """

    verdict: Literal["yes", "no", "unknown"]
    why: str = ""


def separable_by_rows(
    loss_fn: Any, params: Any, batch: Any, *, rng: Any = None, state: Any = None, batch_axes: Any = 0, parts: int = 2
) -> Separability:
    """Whether a loss stays the same if the rows of the batch are dealt out, in any way, to parts of equal size.

    The loss and its gradients are traced on the batch and on one part of it; custom derivative rules are followed like
    any other operation. Metrics are checked too: combined by their kinds, those of the parts must be the batch's.

    Args:
      params: the differentiated parameters, of floating dtype.
      batch: arrays or shapes, with at least as many rows as parts.
      batch_axes: as in `value_and_grad`.
      parts: number of parts.

    >>> import jax.numpy as jnp
    >>> separable_by_rows(lambda w, x: ((x * w) ** 2).mean(), jnp.ones(()), jnp.ones(8)).verdict
    'yes'
    >>> separable_by_rows(lambda w, x: ((x - x.mean()) * w).mean(), jnp.ones(()), jnp.ones(8))
    Separability(verdict='no', why='sub of a row with a sum over rows')
    """
    split = Split.of(batch, 1, batch_axes=batch_axes, pad=None)
    if jax.tree.leaves(state):
        return Separability(verdict="unknown", why="it has model state")
    if split.size % parts:
        cut = "halved" if parts == 2 else f"dealt out to {parts} parts"
        return Separability(verdict="unknown", why=f"{split.size} rows cannot be {cut}")
    try:
        part = jax.eval_shape(lambda b: Split.of(b, parts, batch_axes=batch_axes, pad=None).take(b, 0), batch)
        found = _inquire(loss_fn, (params, part, rng, state), split.axes, parts)
    except Exception as error:  # the loss may fail on fewer rows, or hold an operation that cannot be followed
        return Separability(verdict="unknown", why=f"it could not be followed: {' '.join(str(error).split())[:200]}")
    stages = [[f for _, where, f in found if (where == _GRADIENT) == last] for last in (False, True)]
    bad = (f for stage in stages for verdict in ("no", "unknown") for f in stage if f.verdict == verdict)
    return next(bad, Separability(verdict="yes"))


def check_separable(loss_fn: Any, args: tuple, axes: tuple[int | None, ...], parts: int) -> None:
    """Refuses a loss whose value, gradients or metrics are seen to mix rows; the verdict "unknown" passes.

    Args:
      args: (params, batch, rng, state) of one shard.
      axes: the example axis of each leaf of the batch, None leaves included.
      parts: number of shards.

    Raises:
      ObjectiveError, MetricError: rows are mixed.
    """
    try:
        try:
            found, sure = _inquire(loss_fn, args, axes, parts), True
        except Exception:  # the loss takes this number of rows only; then nothing is known about counts of rows
            found, sure = _inquire(loss_fn, args, axes, 1), False
    except Exception:  # JAX says more about it when the loss is differentiated
        return
    for error, where, known in found:
        if known.verdict == "no" and (sure or known.why != _NO_ROW):
            raise error(
                wanted="a loss in which rows do not depend on one another, since every shard sees its own rows only",
                got=f"{known.why} in {where}",
                do="Reduce gradients every micro-batch (gradient_reduction='each', no data_sharding), or declare how "
                "shards combine such statistics: state_reduction 'mean', 'sum' or 'max'.",
            )


class _Programs:
    """The programs of a loss: of its weights, and of its terms, metrics and gradients."""

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


def _inquire(loss_fn: Any, args: tuple, axes: tuple, parts: int) -> list[tuple[type, str, Separability]]:
    """(class of the error, where, verdict) for each term, metric and gradient.

    Args:
      args: (params, batch, rng, state) of one part.
    """
    params, batch, rng, state = args

    def repeated(times, batch):
        leaves, tree = jax.tree.flatten(batch, is_leaf=lambda x: x is None)
        pairs = zip(leaves, axes, strict=True)
        return tree.unflatten(x if axis is None else jnp.concatenate([x] * times, axis) for x, axis in pairs)

    (size,) = {leaf.shape[axis] for leaf, axis in _leaves(batch, axes) if axis is not None}
    least = 2 if size == 1 else 1  # an axis of size 1 is squeezed and broadcast like no other
    batches = [jax.eval_shape(functools.partial(repeated, times), batch) for times in (least * parts, least)]
    whole, part = (_Programs(loss_fn, params, b, rng, state) for b in batches)
    return list(_findings(whole, part, [CLEAN if a is None else rows(a) for _, a in _leaves(batch, axes)], parts))


def _leaves(batch: Any, axes: tuple) -> list[tuple[Any, int | None]]:
    """(leaf, example axis) of every leaf that is not None."""
    leaves = jax.tree.leaves(batch, is_leaf=lambda x: x is None)
    return [(leaf, axis) for leaf, axis in zip(leaves, axes, strict=True) if leaf is not None]


def _findings(
    whole: _Programs, part: _Programs, of_batch: list[Value], parts: int
) -> Iterator[tuple[type, str, Separability]]:
    params, _, rng, state = jax.tree.unflatten(whole.in_tree, range(whole.in_tree.num_leaves))
    given = [*[CLEAN] * len(jax.tree.leaves(params)), *of_batch, *[CLEAN] * len(jax.tree.leaves((rng, state)))]
    interpreter, count = RowInterpreter(parts, RULES), len(whole.rules)

    def doubt(why):
        return ObjectiveError, "the loss", Separability(verdict="unknown", why=why)

    if whole.weights_need != part.weights_need or whole.gradients_need != part.gradients_need:
        yield doubt("it depends on the number of rows")
        return
    if any(whole.weights_need[i] or whole.gradients_need[count + i] for i in jax.tree.leaves(rng)):
        yield doubt("it draws random numbers")
    needed = [value for value, need in zip(given, whole.weights_need, strict=True) if need]
    weights = iter(interpreter.outputs(whole.weights, part.weights, needed))
    seeds = [_seed(rule, next(weights) if rule == "weighted" else None) for rule in whole.rules]
    needed = [value for value, need in zip([*seeds, *given], whole.gradients_need, strict=True) if need]
    found = interpreter.outputs(whole.gradients, part.gradients, needed)
    gradients, (terms, metrics) = jax.tree.unflatten(whole.out_tree, found)
    plain = True
    for i, (term, seed) in enumerate(zip(terms, seeds, strict=True)):
        values = [term.total] if term.weight is None else [term.total, term.weight]
        good = term.total.zero or term.total.growth + seed.degree == 1
        known = _known(values, good)
        if term.factor.degree:
            known = Separability(verdict="no", why="a factor that depends on the number of rows")
        elif term.factor.kind != "clean":
            known = Separability(verdict="unknown", why=term.factor.why)
        plain &= known.verdict == "yes"
        yield ObjectiveError, f"objective term {i}", known
    for path, metric in jax.tree_util.tree_leaves_with_path(metrics, is_leaf=is_metric):
        where = path_string(path, root="metrics")
        yield MetricError, where, _metric(metric, where)
    for value in jax.tree.leaves(gradients):
        if plain and value.of_sum:  # JAX's derivative of a sum over rows is linear in it, so this is a custom rule
            value = value.with_(kind="mixed")
        yield ObjectiveError, _GRADIENT, _known([value], value.zero or value.growth == 1)


def _seed(rule: str, weight: Value | None) -> Value:
    """The factor of a term's total in the objective, of which only the degree matters.

    One over the total weight; for a mean it grows with the rows, since the mean of a part is divided by the number of
    parts.
    """
    return UNIFORM.with_(degree={"mean": 1, "sum": 0}[rule] if weight is None else 1 - weight.growth)


def _metric(metric, where: str) -> Separability:
    """Whether the metrics of the parts combine to the metric of the whole batch."""
    values = jax.tree.leaves(metric)
    if isinstance(metric, WeightedMean):
        return _known(values, metric.total.zero or metric.total.growth == metric.weight.growth)
    (value,) = values
    if isinstance(metric, Max) and value.kind == "largest":
        return Separability(verdict="yes")
    if isinstance(metric, Last) and value.kind != "clean":
        return Separability(verdict="unknown", why=f"a Last of the rows at {where}")
    return _known(values, value.zero or value.growth == (0 if isinstance(metric, (Max, Last)) else 1))


def _known(values: list[Value], good: bool) -> Separability:
    if bad := worst(values):
        return Separability(verdict="no" if bad.kind == "mixed" else "unknown", why=bad.why)
    if any(value.kind == "rows" for value in values):
        return Separability(verdict="unknown", why="a value of one row")
    if good:
        return Separability(verdict="yes")
    return (
        Separability(verdict="no", why=_NO_ROW)
        if values[0].kind == "clean"
        else Separability(verdict="unknown", why=_NO_SUM)
    )
