"""A loss traced once for one micro-batch, with its outputs sorted into terms, metrics and state."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxmem._compat import prune
from jaxmem._signatures import call_loss
from jaxmem.accumulate._reduce import is_metric
from jaxmem.errors import DifferentiableWeight, IntegerParameterError, MetricError, ObjectiveError, StateError
from jaxmem.objective import LossOutput, Sum, WeightedMean, terms_of
from jaxmem.workload import is_array_like, path_string


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Term:
    """One term of an objective on one micro-batch.

    The whole batch's value is `factor` times: sum of totals over sum of weights (rule "weighted"),
    the mean of totals over micro-batches ("mean", a bare scalar), or their sum ("sum", a `Sum`).
    """

    factor: Any
    total: Any
    weight: Any = None
    rule: str = dataclasses.field(default="weighted", metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroLoss:
    """The outputs of one call of the loss."""

    terms: tuple[Term, ...]
    metrics: Any
    state: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class TracedLoss:
    """The jaxpr of a loss on one micro-batch, and the tree structures of its inputs and outputs.

    The loss's Python code runs once. The weights pre-pass is pruned from the same jaxpr that is differentiated, so the
    two cannot disagree.
    """

    jaxpr: jex.ClosedJaxpr
    in_tree: Any
    out_tree: Any
    out_shapes: MicroLoss

    @classmethod
    def of(cls, loss_fn, params, batch, rng, state) -> "TracedLoss":
        def flat_loss(*leaves):
            params, batch, rng, state = jax.tree.unflatten(in_tree, leaves)
            return jax.tree.leaves(classify(call_loss(loss_fn, params, batch, rng=rng, state=state), state, out))

        flat_loss.__name__ = getattr(loss_fn, "__name__", "loss")  # so that JAX's errors name the user's function
        flat_loss.__wrapped__ = loss_fn  # pyright: ignore[reportFunctionMemberAccess]
        out = {}
        leaves, in_tree = jax.tree.flatten((params, batch, rng, state))
        jaxpr = jax.make_jaxpr(flat_loss)(*leaves)
        shapes = jax.tree.unflatten(out["tree"], jaxpr.out_avals)
        return cls(jaxpr=jaxpr, in_tree=in_tree, out_tree=out["tree"], out_shapes=shapes)

    def __call__(self, params, batch, rng, state) -> MicroLoss:
        leaves = jax.tree.leaves((params, batch, rng, state))
        return jax.tree.unflatten(self.out_tree, _evaluate(self.jaxpr, leaves))

    def cut(self, select) -> "tuple[Any, Any]":
        """The loss pruned to the outputs that `select(MicroLoss)` picks.

        Returns `(fn, used)`: a function of the same arguments, and for each of them whether it is used, as a tree
        `(params, batch, rng, state)` of bools.
        """
        picked, tree = self._picked(select)
        pruned, used = self.pruned(select)
        order = sorted(set(picked))

        def fn(params, batch, rng, state):
            leaves = jax.tree.leaves((params, batch, rng, state))
            outs = _evaluate(pruned, [leaf for leaf, use in zip(leaves, used, strict=True) if use])
            return tree.unflatten([outs[order.index(i)] for i in picked])

        return fn, jax.tree.unflatten(self.in_tree, used)

    def pruned(self, select) -> "tuple[jex.ClosedJaxpr, list[bool]]":
        """The jaxpr of the outputs that `select` picks, in their original order, and which flat arguments it takes."""
        picked, _ = self._picked(select)
        return prune(self.jaxpr, [i in picked for i in range(len(self.jaxpr.out_avals))])

    def _picked(self, select) -> "tuple[list[int], Any]":
        marks = jax.tree.unflatten(self.out_tree, list(range(len(self.jaxpr.out_avals))))
        return jax.tree.flatten(select(marks))


def counted_leaves(loss_fn, params, batch, *, rng=None, state=None) -> Any:
    """Which leaves of the batch are used to compute weights of the objective and of metrics: a tree of bools.

    These leaves hold masks and counts, which a narrow dtype would round: bfloat16 cannot represent 257.
    """

    def weights(micro):
        metrics = jax.tree.leaves(micro.metrics, is_leaf=is_metric)
        return [x.weight for x in (*micro.terms, *metrics) if getattr(x, "weight", None) is not None]

    _, (_, used, _, _) = TracedLoss.of(loss_fn, params, batch, rng, state).cut(weights)
    return used


def _evaluate(jaxpr, leaves):
    return [jnp.asarray(out) for out in jex.jaxpr_as_fun(jaxpr)(*leaves)]  # constants are Python numbers


def classify(output, state, out: dict) -> MicroLoss:
    """Checks the output of a loss and sorts it; stores the tree structure in `out["tree"]`."""
    if not isinstance(output, LossOutput):
        output = LossOutput(output)
    micro = MicroLoss(
        terms=tuple(term_of(factor, term) for factor, term in terms_of(output)),
        metrics=_check_metrics(output.metrics),
        state=state if output.state is None else _check_state(output.state, state),
    )
    out["tree"] = jax.tree.structure(micro)
    return micro


def check_differentiable(params) -> None:
    """IntegerParameterError if the dtype of a leaf of `params` has no gradient."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = jnp.result_type(leaf)
        if not jnp.issubdtype(dtype, jnp.inexact):
            raise IntegerParameterError(
                wanted="parameters of floating dtype",
                got=f"{dtype} at {path_string(path, root='params')}",
                do="What is differentiated comes first: value_and_grad(loss_fn, K)(params, batch). In a Workload leave "
                "that leaf out with `trainable`, or pass it as `state`.",
            )


def check_weights(traced: TracedLoss) -> None:
    """DifferentiableWeight if a weight depends on the parameters; ObjectiveError if a factor varies."""
    for i, term in enumerate(traced.out_shapes.terms):
        if term.rule == "weighted":
            _, used = traced.cut(lambda micro, i=i: micro.terms[i].weight)
            for path, needed in jax.tree_util.tree_leaves_with_path(used[0]):
                if needed:
                    raise DifferentiableWeight(
                        wanted=f"the weight of objective term {i} to depend on data only",
                        got=f"a weight that depends on {path_string(path, root='params')}",
                        do="Compute the weight from the batch, e.g. the number of valid tokens.",
                    )
        _, needs = traced.cut(lambda micro, i=i: micro.terms[i].factor)
        if any(jax.tree.leaves(needs)):
            raise ObjectiveError(
                wanted=f"the factor of objective term {i} to be a constant of the step",
                got="a factor computed from the parameters, the batch, the key or the state",
                do="Fold it into the term's total, or close over it.",
            )


def term_of(factor, term) -> Term:
    """One term of an objective; ObjectiveError for what is none."""
    factor = jnp.asarray(factor, float)  # float64 where that is enabled
    if isinstance(term, WeightedMean):
        weight = _scalar(term.weight, "weight", allow_integer=True)
        return Term(factor=factor, total=_scalar(term.total, "total"), weight=weight)
    if isinstance(term, Sum):
        return Term(factor=factor, total=_scalar(term.value, "value"), rule="sum")
    return Term(factor=factor, total=_scalar(term, "value"), rule="mean")


def _scalar(value, what: str, *, allow_integer: bool = False):
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        value = jnp.asarray(value, None if allow_integer else jnp.float32)
    if getattr(value, "shape", None) == ():
        dtype = jnp.result_type(value)
        if jnp.issubdtype(dtype, jnp.floating) or (allow_integer and jnp.issubdtype(dtype, jnp.integer)):
            return jnp.asarray(value)
    if isinstance(value, tuple):
        raise ObjectiveError(
            wanted="a loss that returns its objective alone",
            got=f"a tuple of {len(value)}",
            do="With (loss, aux) write accumulate.value_and_grad(loss_fn, K, has_aux=True); in a Workload return "
            "LossOutput(loss, metrics={'accuracy': WeightedMean(num_correct, num_examples)}).",
        )
    kind = f"{jnp.result_type(value)}{list(jnp.shape(value))}" if is_array_like(value) else type(value).__name__
    raise ObjectiveError(
        wanted="an objective made of real scalars: a scalar, a WeightedMean, a Sum, or a sum of these",
        got=f"{what} = {kind}",
        do="Sum over examples and return WeightedMean(total, weight), or take the mean.",
    )


def _check_metrics(metrics):
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise MetricError(
            wanted="metrics to be a mapping from names to WeightedMean, Sum, Max or Last",
            got=f"a {type(metrics).__name__}",
            do='Give each metric a name, e.g. {"tokens": Sum(num_tokens)}.',
        )
    leaves = jax.tree_util.tree_leaves_with_path(metrics, is_leaf=lambda x: x is None or is_metric(x))
    for path, leaf in leaves:
        where = path_string(path, root="metrics")
        if not is_metric(leaf):
            raise MetricError(
                wanted="every metric to say how micro-batches combine: WeightedMean, Sum, Max or Last",
                got=f"a bare {type(leaf).__name__} at {where}",
                do="Wrap it, e.g. WeightedMean(correct, num_tokens) or Sum(num_tokens).",
            )
        values = jax.tree.leaves(leaf, is_leaf=lambda x: x is None)
        for value in values:
            kind = jnp.result_type(value) if is_array_like(value) else type(value).__name__
            real = is_array_like(value) and (jnp.issubdtype(kind, jnp.number) or kind == jnp.bool_)
            if not real or jnp.issubdtype(kind, jnp.complexfloating):
                raise _unfit(leaf, where, wanted="real numbers", got=str(kind))
        shapes = [jnp.shape(value) for value in values]
        try:
            jnp.broadcast_shapes(*shapes)
        except ValueError:
            raise _unfit(leaf, where, wanted="a total and a weight that broadcast", got=str(shapes)) from None
    return jax.tree.map(jnp.asarray, metrics)


def _unfit(metric, where: str, *, wanted: str, got: str) -> MetricError:
    return MetricError(
        wanted=f"{wanted} in the {type(metric).__name__} at {where}", got=got, do="Correct what the loss returns."
    )


def _check_state(new, old):
    """The new state with the dtypes of the old; StateError where they do not correspond."""
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise StateError(
            wanted=f"a new state of the structure passed in, {jax.tree.structure(old)}",
            got=f"{jax.tree.structure(new)}",
            do="Pass the initial state to the workload, and return the same tree in LossOutput.state.",
        )

    def check(path, new_leaf, old_leaf):
        new_leaf = jnp.asarray(new_leaf)
        got, want = (f"{jnp.result_type(x)}{list(jnp.shape(x))}" for x in (new_leaf, old_leaf))
        if got != want:
            raise StateError(
                wanted=f"{want} at {path_string(path, root='state')}",
                got=got,
                do="Keep the shape and dtype of the state that was passed in.",
            )
        return new_leaf

    return jax.tree_util.tree_map_with_path(check, new, old)
