"""Whether shards of a batch may accumulate their gradients by themselves, found out from the programs of the loss."""

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, Literal

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxmem._compat import prune
from jaxmem.accumulate._reduce import is_metric
from jaxmem.accumulate._row_rules import RULES
from jaxmem.accumulate._rows import CLEAN, UNIFORM, Follower, Value, rows, worst
from jaxmem.accumulate._split import Split
from jaxmem.accumulate._trace import MicroLoss, TracedLoss
from jaxmem.errors import MetricError, ObjectiveError
from jaxmem.objective import Last, Max, WeightedMean
from jaxmem.workload import path_string

_GRADIENT = "the gradient of the objective"
_NO_SUM = "it is no sum or mean over rows"
_NO_ROW = "what belongs to no row, of which every shard would add its own,"


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
    """What a loss gives besides its state, and its gradients, as programs without what they do not need."""

    def __init__(self, loss_fn, params, batch, rng, state):
        args = (params, batch, rng, state)
        traced = TracedLoss.of(loss_fn, *args)
        self.shapes = traced.out_shapes
        self.in_tree = traced.in_tree
        self.forward, self.forward_needs = traced.pruned(lambda micro: (micro.terms, micro.metrics))

        def gradients(seeds, params, *rest):
            def objective(params):
                terms = traced(params, *rest).terms
                return sum(seed * term.total.astype(seed.dtype) for seed, term in zip(seeds, terms, strict=True))

            return jax.grad(objective)(params)

        seeds = [jnp.promote_types(term.total.dtype, jnp.float32) for term in self.shapes.terms]
        closed = jax.make_jaxpr(gradients)([jax.ShapeDtypeStruct((), dtype) for dtype in seeds], *args)
        self.backward, self.backward_needs = prune(closed, [True] * len(closed.out_avals))

    def sorted(self, values: list[Value]) -> MicroLoss:
        """Values of the outputs of `forward`, each in its place."""
        return jax.tree.unflatten(jax.tree.structure(dataclasses.replace(self.shapes, state=None)), values)


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
    follow = Follower(parts, RULES)

    def outputs(name, given):
        mine, needs = getattr(whole, name), getattr(whole, f"{name}_needs")
        if needs != getattr(part, f"{name}_needs"):
            return None
        return follow.outputs(mine, getattr(part, name), [v for v, need in zip(given, needs, strict=True) if need])

    def doubt(why):
        return ObjectiveError, "the loss", Independence(verdict="unknown", why=why)

    forward, count = outputs("forward", given), len(whole.shapes.terms)
    if forward is None:
        yield doubt("it depends on the number of rows")
        return
    if any(whole.forward_needs[i] or whole.backward_needs[count + i] for i in jax.tree.leaves(rng)):
        yield doubt("it draws random numbers")
    micro, seeds = whole.sorted(forward), []
    for i, term in enumerate(micro.terms):
        seed, found = _term(term)
        seeds.append(seed)
        yield ObjectiveError, f"objective term {i}", found
    for path, metric in jax.tree_util.tree_leaves_with_path(micro.metrics, is_leaf=is_metric):
        where = path_string(path, root="metrics")
        yield MetricError, where, _metric(metric, where)
    backward = outputs("backward", [*seeds, *given])
    if backward is None:
        yield doubt("its gradient depends on the number of rows")
    for value in backward or []:
        yield ObjectiveError, _GRADIENT, _known([value], value.zero or value.grown == 1)


def _term(term) -> tuple[Value, Independence]:
    """What a term's total is multiplied by before it is differentiated, and what is known of the term.

    By one over the total weight; the mean of a part counts as much less as there are parts.
    """
    weight = UNIFORM if term.weight is None else term.weight
    degree = {"mean": 1, "sum": 0}.get(term.rule, 1 - weight.grown)
    return UNIFORM.with_(degree=degree), _known([term.total, weight], term.total.zero or term.total.grown + degree == 1)


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
    return Independence(verdict="no", why=_NO_ROW) if values[0].kind == "clean" else Independence(verdict="unknown", why=_NO_SUM)
