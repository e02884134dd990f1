"""Whether shards of a batch may accumulate their gradients by themselves, found out from the program of the loss."""

import dataclasses
from typing import Any, Literal

import jax

from jaxmem.accumulate._alignment import Alignment, clean, worst
from jaxmem.accumulate._rows import Follower, batch_alignments
from jaxmem.accumulate._split import Split
from jaxmem.accumulate._trace import TracedLoss
from jaxmem.errors import ObjectiveError

_RATIO = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Independence:
    """What is known of a loss.

    Args:
      verdict: "yes", its objective is the same however the rows are dealt out; "no", rows know of one another;
        "unknown" otherwise.
      why: in a few words, unless "yes".
    """

    verdict: Literal["yes", "no", "unknown"]
    why: str = ""


def independent_rows(
    loss_fn: Any, params: Any, batch: Any, *, rng: Any = None, state: Any = None, batch_axes: Any = 0
) -> Independence:
    """Whether the objective of a loss is the same however the rows of the batch are dealt out to parts of equal size.

    The loss is traced on the batch and on half of it. Metrics are not looked at: their kinds say how they combine.

    Args:
      batch: of at least two rows; arrays or shapes.
      batch_axes: as in `value_and_grad`.

    >>> import jax.numpy as jnp
    >>> independent_rows(lambda w, x: ((x * w) ** 2).mean(), jnp.ones(()), jnp.ones(8)).verdict
    'yes'
    >>> independent_rows(lambda w, x: ((x - x.mean()) * w).mean(), jnp.ones(()), jnp.ones(8))
    Independence(verdict='no', why='sub of a row with a sum over rows')
    """
    split = Split.of(batch, 1, batch_axes=batch_axes, pad=None)
    if jax.tree.leaves(state):
        return Independence(verdict="unknown", why="it has model state")
    if split.size % _RATIO:
        return Independence(verdict="unknown", why=f"{split.size} rows cannot be halved")
    half = jax.eval_shape(lambda b: Split.of(b, _RATIO, batch_axes=batch_axes, pad=None).take(b, 0), batch)
    one = TracedLoss.of(loss_fn, params, batch, rng, state)
    try:
        other = TracedLoss.of(loss_fn, params, half, rng, state)
    except (TypeError, ValueError):  # a loss made for so many rows and no others
        return Independence(verdict="unknown", why="it does not take half as many rows")
    given = [
        *[clean()] * len(jax.tree.leaves(params)),
        *batch_alignments(batch, split.axes),
        *[clean()] * len(jax.tree.leaves(rng)),
    ]
    found = []
    for i, term in enumerate(one.out_shapes.terms):
        programs, used = [], []
        for traced in (one, other):
            pruned, needs = traced.pruned(lambda micro, i=i: (micro.terms[i].total, micro.terms[i].weight))
            programs.append(pruned.jaxpr)
            used.append(needs)
        if used[0] != used[1]:
            return Independence(verdict="unknown", why="its program depends on the number of rows")
        if rng is not None and any(used[0][len(given) - len(jax.tree.leaves(rng)) :]):
            return Independence(verdict="unknown", why="it draws random numbers")
        inputs = [value for value, need in zip(given, used[0], strict=True) if need]
        total, *weight = Follower(_RATIO).outputs(programs[0], programs[1], inputs)
        found.append(_judge(term.rule, total, weight[0] if weight else None))
    return next((f for v in ("no", "unknown") for f in found if f.verdict == v), Independence(verdict="yes"))


def check_rows_apart(traced: TracedLoss, batch: Any, axes: tuple[int | None, ...]) -> None:
    """ObjectiveError for an objective in which rows are seen to know of one another; what is not known passes.

    Args:
      batch: what the loss was traced on.
      axes: the example axis of each leaf, None leaves included.
    """
    found = jax.tree.unflatten(traced.in_tree, [clean()] * traced.in_tree.num_leaves)
    given = [*jax.tree.leaves(found[0]), *batch_alignments(batch, axes), *jax.tree.leaves(found[2:])]
    for i in range(len(traced.out_shapes.terms)):
        pruned, used = traced.pruned(lambda micro, i=i: (micro.terms[i].total, micro.terms[i].weight))
        inputs = [value for value, need in zip(given, used, strict=True) if need]
        bad = worst(Follower(1).outputs(pruned.jaxpr, pruned.jaxpr, inputs))
        if bad is not None and bad.kind == "mixed":
            raise ObjectiveError(
                wanted="a loss whose rows know nothing of one another, since every shard sees its own rows only",
                got=f"{bad.why} in objective term {i}",
                do="Reduce gradients every micro-batch (gradient_reduction='each', no data_sharding), or declare how "
                "shards combine such statistics: state_reduction 'mean', 'sum' or 'max'.",
            )


def _judge(rule: str, total: Alignment, weight: Alignment | None) -> Independence:
    """Whether parts of equal size add up: of a term's total and weight on one part."""
    for value, what in ((total, "total"), (weight, "weight")):
        if value is not None and value.kind in ("mixed", "unknown"):
            return Independence(verdict="no" if value.kind == "mixed" else "unknown", why=value.why)
        if value is not None and value.kind == "rows":
            return Independence(verdict="unknown", why=f"a {what} of one row")
    if rule == "mean":
        good = total.degree == (-1 if total.kind == "sum" else 0)
    elif rule == "sum":
        good = total.kind == "sum" and total.pure and total.degree == 0
    else:
        assert weight is not None
        # As many parts as there are, each with its share of the weights: the quotient of sums must not change.
        grown = [value.degree + (value.kind == "sum") for value in (total, weight)]
        pure = (total.kind == "clean" or total.pure) and (weight.kind == "clean" or weight.pure)
        good = total.zero or (pure and grown[0] == grown[1])
    return (
        Independence(verdict="yes") if good else Independence(verdict="unknown", why="it is no sum or mean over rows")
    )
