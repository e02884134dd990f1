"""A loss that returns `(loss, aux)`: each leaf of aux becomes what it is over the whole batch, or is refused."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem._signatures import call_loss
from jaxmem.accumulate._reduce import Rows, is_metric
from jaxmem.accumulate._trace import term_of
from jaxmem.accumulate.separability import Output, outputs_by_rows
from jaxmem.errors import MetricError, ObjectiveError, StateError
from jaxmem.objective import Last, LossOutput, Max, Sum, WeightedMean, terms_of
from jaxmem.workload import path_string

_ARRAY, _STATE = object(), object()  # stand in aux for an array, and for the model's new state


class AuxLoss:
    """A loss that returns `(loss, aux)`, as one that returns a `LossOutput` whose metrics are the leaves of aux.

    Args:
      loss_fn: called with what it declares of `rng` and `state`.
    """

    def __init__(self, loss_fn: Callable):
        self._loss_fn = loss_fn
        self.outputs: list[Output] | None = None  # what each array of aux is to the rows; None where the batch is whole
        self._tree: Any = None
        self._fixed: list = []  # leaves that are no arrays, Python numbers among them
        self._dtypes: list = []
        self.paths: list[str] = []  # of the arrays whose kind is not declared
        self.__name__ = getattr(loss_fn, "__name__", "loss")

    def __call__(self, params, batch, *, rng, state) -> LossOutput:
        output, leaves = self._call(params, batch, rng, state)
        metrics, outputs = {}, iter(self.outputs or ())
        for i, leaf in enumerate(leaves):
            if _is_bare(leaf):
                leaf = Last(leaf) if self.outputs is None else _declared(leaf, next(outputs))
            if is_metric(leaf):
                metrics[f"{i}"] = leaf
        return LossOutput(output.objective, {"metrics": output.metrics or {}, "aux": metrics}, output.state)

    def undeclared(self, params, batch, *, rng, state) -> tuple[LossOutput, list]:
        """The output without aux, and the arrays of aux whose kind is not declared."""
        output, leaves = self._call(params, batch, rng, state)
        return output, [leaf for leaf in leaves if _is_bare(leaf)]

    def rebuilt(self, metrics: dict, state: Any, size: int) -> tuple[Any, Any]:
        """The user's metrics, and aux as the loss returned it, over a batch of `size` rows."""
        outputs, dtypes, leaves = iter(self.outputs or ()), iter(self._dtypes), []
        for i, fixed in enumerate(self._fixed):
            leaf = metrics["aux"].get(f"{i}", fixed)
            number = _is_number(fixed)
            if self.outputs is None:
                leaf = fixed if number else leaf
            elif number or fixed is _ARRAY:
                output, dtype = next(outputs), next(dtypes)
                leaf = fixed if number and output.kind == "same" else leaf.astype(dtype)
                if output.kind == "rows":  # without the rows that `pad` added
                    leaf = jax.lax.slice_in_dim(leaf, 0, size * output.inner, axis=output.axis)
            leaves.append(state if fixed is _STATE else leaf)
        return metrics["metrics"], self._tree.unflatten(leaves)

    def _call(self, params, batch, rng, state) -> tuple[LossOutput, list]:
        returned = call_loss(self._loss_fn, params, batch, rng=rng, state=state)
        if not isinstance(returned, tuple) or len(returned) != 2:
            shown = f"a tuple of {len(returned)}" if isinstance(returned, tuple) else "one value"
            raise ObjectiveError(
                wanted="a loss that returns (loss, aux), as has_aux=True says",
                got=shown,
                do="Return two values, such as loss, (logits, metrics); or leave has_aux out.",
            )
        output, aux = returned
        output = output if isinstance(output, LossOutput) else LossOutput(output)
        if output.state is None and jax.tree.leaves(state):
            new, aux = _without_state(aux, state)
            output = LossOutput(output.objective, output.metrics, new)
        named, self._tree = jax.tree_util.tree_flatten_with_path(aux, is_leaf=is_metric)
        leaves = [leaf for _, leaf in named]
        is_array = lambda x: _is_bare(x) and not _is_number(x)  # noqa: E731
        self._fixed = [_ARRAY if is_array(leaf) else None if is_metric(leaf) else leaf for leaf in leaves]
        self._dtypes = [jnp.result_type(leaf) for leaf in leaves if _is_bare(leaf)]
        self.paths = [path_string(path, root="aux") for path, leaf in named if _is_bare(leaf)]
        return output, leaves


def find_outputs(
    loss_fn: Callable,
    params,
    batch,
    rng,
    state,
    axes: tuple,
    *,
    means: bool = True,
    padded: bool = False,
    shards: int = 1,
) -> None:
    """Finds what bare scalars of the objective, and arrays of aux, are to the rows of a batch that is cut.

    Args:
      loss_fn: an `AuxLoss`, which is told, where there is aux.
      batch: one micro-batch; `axes` are the example axes of its leaves.
      means: whether bare scalars of the objective are checked.
      padded: some rows must not count.
      shards: among which rows are dealt out, beside micro-batches.

    Raises:
      ObjectiveError: a bare scalar that is no mean over rows, so that micro-batches would not come to it.
      MetricError: a leaf of aux that micro-batches would not come to.
    """
    rules: list[str] = []
    shapes: list[tuple] = []

    def outputs(batch, rest):
        params, rng, state = rest
        if isinstance(loss_fn, AuxLoss):
            output, arrays = loss_fn.undeclared(params, batch, rng=rng, state=state)
        else:
            output, arrays = call_loss(loss_fn, params, batch, rng=rng, state=state), []
        terms = [term_of(*each) for each in terms_of(output)]
        rules[:] = [term.rule for term in terms]
        shapes[:] = [(jnp.result_type(x), jnp.shape(x)) for x in arrays]
        return [*(term.total for term in terms), *map(jnp.asarray, arrays)]

    found = outputs_by_rows(outputs, batch, axes, (params, rng, state), lambda: len(rules))
    terms, arrays = found[: len(rules)], found[len(rules) :]
    for rule, output in zip(rules, terms, strict=True):
        if means and rule == "mean" and output.kind in ("sum", "max", "nonlinear"):
            raise _no_mean(output)
    if isinstance(loss_fn, AuxLoss):
        named = zip(loss_fn.paths, shapes, arrays, strict=True)
        loss_fn.outputs = [_combined(*each, padded=padded) for each in named]
        for path, output in zip(loss_fn.paths, loss_fn.outputs, strict=True):
            if output.kind == "rows" and shards > 1:
                raise MetricError(
                    wanted="outputs beside the loss that every shard can have whole",
                    got=f"a value for each row at {path}, of rows that lie on {shards} shards",
                    do="Return what is computed of it, such as an accuracy; or leave data_sharding out.",
                )


def _no_mean(output: Output) -> ObjectiveError:
    what = {"sum": "a sum over rows", "max": "a maximum over rows"}.get(output.kind, output.why)
    return ObjectiveError(
        wanted="a loss that is a mean over rows where it is a bare scalar, since micro-batches are averaged",
        got=what,
        do="For a mean over tokens or valid rows return jaxmem.WeightedMean(total, weight), such as "
        "WeightedMean(jnp.sum(losses * mask), jnp.sum(mask)); for a sum jaxmem.Sum(total); and no root of either. "
        "check_mean=False averages it as it is.",
    )


def _combined(path: str, shape: tuple, output: Output, *, padded: bool) -> Output:
    """What an array of aux is; MetricError where its micro-batches cannot be combined."""
    dtype, dims = shape
    why = "rows that `pad` added count in it" if padded and output.kind in ("mean", "sum", "max") else output.why
    if output.kind in ("mean", "sum", "max", "same", "rows") and not why:
        return output
    raise MetricError(
        wanted="each output beside the loss to be a mean, sum or maximum over rows, or to hold a value for each row",
        got=f"{dtype}{list(dims)} at {path}: {why}",
        do="Say how micro-batches combine it: jaxmem.WeightedMean(total, weight), Sum, Max or Last round it. What a "
        "model carries from call to call, such as batch_stats, goes in as fn(params, batch, state=batch_stats): "
        "declare `state` in the loss, and return the new one, of the same structure, in aux.",
    )


def _declared(leaf, output: Output):
    """A leaf of aux as the kind of metric that it is."""
    if output.kind == "rows":
        return Rows(value=leaf, axis=output.axis, inner=output.inner)
    if output.kind == "mean":
        return WeightedMean(leaf, 1.0)
    return {"sum": Sum, "max": Max, "same": Last}[output.kind](leaf)


def _is_bare(leaf: Any) -> bool:
    """Whether a leaf of aux is an array, or a number, whose kind is not declared."""
    return isinstance(leaf, (jax.Array, np.ndarray, np.generic)) or _is_number(leaf)


def _is_number(leaf: Any) -> bool:
    """Whether a leaf is a Python number, such as `x.shape[0]`, which counts the rows of a micro-batch."""
    return type(leaf) in (int, float) and (isinstance(leaf, float) or abs(leaf) < 2**31)


def _without_state(aux: Any, state: Any) -> tuple[Any, Any]:
    """The part of aux that has the structure, shapes and dtypes of the state, or None; and aux with a mark there."""
    found: list = []

    def is_state(x) -> bool:
        if _alike(x, state):
            found.append(x)
            return True
        return is_metric(x)

    marked = jax.tree.map(lambda x: _STATE if _alike(x, state) else x, aux, is_leaf=is_state)
    if len(found) > 1:
        raise StateError(
            wanted="the new state once in what the loss returns beside its value",
            got=f"{len(found)} trees of the structure of `state`",
            do="Return only the new one, or return LossOutput(loss, state=new_state), aux.",
        )
    return (found[0] if found else None), marked


def _alike(x: Any, state: Any) -> bool:
    if jax.tree.structure(x) != jax.tree.structure(state) or is_metric(x):
        return False
    pairs = list(zip(jax.tree.leaves(x), jax.tree.leaves(state), strict=True))
    return all(_is_bare(a) and jnp.shape(a) == jnp.shape(b) for a, b in pairs) and all(
        jnp.result_type(a) == jnp.result_type(b) for a, b in pairs
    )
