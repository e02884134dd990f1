"""`value_and_grad` over micro-batches: one `lax.scan`, equal to the one-batch step."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._flax import is_nnx_object
from jaxmem._scopes import ACCUMULATE_SCOPE, OPTIMIZER_SCOPE
from jaxmem.accumulate import _reduce
from jaxmem.accumulate._arguments import Arguments, check_call, folding
from jaxmem.accumulate._aux import AuxLoss, find_outputs
from jaxmem.accumulate._gradients import Gradients
from jaxmem.accumulate._micro_batch_scans import add_up, total_weights, weight_dtype
from jaxmem.accumulate._nnx import NnxCall
from jaxmem.accumulate._shard_checks import check_local, check_params
from jaxmem.accumulate._shard_checks import check_rows as check_whole_rows
from jaxmem.accumulate._shards import Shards, axis_names, shard_key, shard_state
from jaxmem.accumulate._split import Split
from jaxmem.accumulate._trace import TracedLoss, check_differentiable, check_weights
from jaxmem.accumulate.separability import check_separable
from jaxmem.config import float_dtype_name, step_count
from jaxmem.errors import BatchError, ConfigError, ObjectiveError

_NOT_GIVEN = object()


def value_and_grad(
    loss_fn: Callable,
    num_micro_batches: int,
    *,
    accumulator_dtype: Any = jnp.float32,
    batch_axes: Any = 0,
    state_reduction: Any = "carry",
    data_sharding: Any = None,
    pad: Any = None,
    in_place: bool | None = None,
    separable: bool = False,
    has_aux: bool = False,
    wrt: Any = None,
    check_mean: bool = True,
) -> Callable[..., Gradients]:
    r"""The value and gradient of a loss over a batch, computed micro-batch by micro-batch.

    For an objective of terms :math:`\sum_t f_t \frac{\sum_i T_{ti}}{\sum_i W_{ti}}` over micro-batches i,
    the weights :math:`W_t` are summed first, then gradients of :math:`\sum_t f_t T_{ti} / W_t` are added up
    in one `lax.scan`. So gradients equal the full batch's however unevenly valid tokens are spread.

    Args:
      loss_fn: `loss_fn(params, batch, *, rng, state)`; it gets only the keywords that it declares. Or
        `loss_fn(params, x, y, key, train=True)`, as `jax.value_and_grad` takes it, or `loss_fn(model, batch)` with an
        nnx module. It returns a scalar (mean over examples), a `WeightedMean`, a `Sum`, a sum of these, or a
        `LossOutput`; with `has_aux` such an objective and aux.
      num_micro_batches: K. Micro-batch i holds rows i, i + K, … (see `micro_batch`); its key is
        `fold_in(rng, i)`. K = 1 is the plain step: the loss gets the batch and `rng` unchanged.
      accumulator_dtype: dtype in which gradients are summed. A parameter of a wider dtype, such as float64, is summed
        in its own, unless 16 bits are asked for. The sum is cast to the parameter's dtype once.
      batch_axes: pytree prefix of the batch with each leaf's example axis; None passes a leaf whole. Or a tuple with
        an entry for each argument after the parameters: `(0, 0, None)` for `(x, y, key)`. PRNG keys among several
        arguments get the micro-batch's index folded in; what is no array stays what it is. An array that may have rows
        and is not declared is refused.
      state_reduction: pytree prefix of `state`. "carry": micro-batch i + 1 sees the state that i returned. Otherwise
        every micro-batch sees the initial state: "mean", "sum" (increments add up), "max" or "last".
      data_sharding: a NamedSharding of the batch, or names of axes of the mesh that `jax.set_mesh` set. Every shard of
        the batch then accumulates its own gradients, in K micro-batches of its own rows, and they are reduced once,
        after the loop. Weights and metrics count all shards; a shard's key is `fold_in(rng, shard)`. This equals the
        plain step for a loss that is separable by rows (see `separable_by_rows`) and draws no random numbers. Refused
        are parameters sharded over these axes, collectives in the loss, carried state that depends on the rows, and
        losses that are seen to mix rows (normalisation over the batch, in-batch negatives), unless a state reduction
        other than "carry" and "last" says how shards combine their statistics. Without data_sharding a sharded
        batch is not moved either, and JAX reduces the gradients of every micro-batch.
      pad: pytree prefix of the batch with fill values, for a B that K does not divide. The objective must
        be weighted, and padded rows must have weight 0, e.g. by labels of -100. `Sum` and `Max`
        metrics see the padded rows too.
      in_place: whether the backward pass adds gradients to the accumulators itself, so that a micro-batch's gradients
        need no bytes of their own. None: wherever it can, which needs an accumulator of the parameter's dtype. True:
        everywhere, or ConfigError. False: nowhere. `Gradients.added` says where it was done.
      separable: whether `separable_by_rows` has said "yes" about this loss, for a micro-batch dealt out to the shards;
        then local accumulation does not check it again, which saves two traces of the loss and of its gradients.
      has_aux: the loss returns (objective, aux). A leaf of aux that is a mean, a sum or a maximum over rows, or holds a
        value for each row, is that of the whole batch, rows in their order; whether it is one is told from the loss's
        jaxpr. Others say how micro-batches combine (`WeightedMean`, `Sum`, `Max`, `Last`), or are refused. A part of
        aux of the structure of `state` is the new state.
      wrt: nnx filter of what is differentiated of a module; `nnx.Param` unless given.
      check_mean: whether a bare scalar that is no mean over rows is refused, such as a masked mean; for K > 1 this
        traces the loss twice more.

    Returns:
      `fn(params, batch, *more, rng=None, state=None, loss_scale=None, **keywords) -> Gradients`, which unpacks to
      `value, grads`, or `(value, aux), grads`. The objective is multiplied by `loss_scale` before differentiation, and
      gradients are divided by it afterwards. Of an nnx module the gradients are those of `nnx.value_and_grad`, and its
      state (BatchNorm statistics, counts of random numbers) is updated once, after all micro-batches.

    Raises:
      BatchError, ConfigError, IntegerParameterError, ObjectiveError, DifferentiableWeight, MetricError, StateError:
        when `fn` is traced; each names the leaf.

    >>> import jax.numpy as jnp
    >>> from jaxmem import WeightedMean, accumulate
    >>> def loss(w, batch):
    ...     return WeightedMean(jnp.sum(batch["mask"] * (batch["x"] * w) ** 2), jnp.sum(batch["mask"]))
    >>> batch = {"x": jnp.arange(4.0), "mask": jnp.array([1, 0, 1, 1])}
    >>> accumulate.value_and_grad(loss, 2)(jnp.float32(1.0), batch).grads  # 2 (0 + 4 + 9) / 3
    Array(8.666667, dtype=float32)
    """
    if not callable(loss_fn):
        raise ConfigError(
            wanted="value_and_grad(loss_fn, num_micro_batches)",
            got=f"a {type(loss_fn).__name__} in place of the loss",
            do="Give the loss first: accumulate.value_and_grad(loss_fn, 4).",
        )
    num_micro_batches = step_count(num_micro_batches, "num_micro_batches")
    if in_place is not None and not isinstance(in_place, bool):
        raise ConfigError(wanted="in_place to be None, True or False", got=repr(in_place), do="Leave it out.")
    if data_sharding is not None and not isinstance(data_sharding, jax.sharding.NamedSharding):
        data_sharding = axis_names(data_sharding)
    accumulator_dtype = jnp.dtype(float_dtype_name(accumulator_dtype, "accumulator_dtype"))

    def fn(params, batch=_NOT_GIVEN, *extra, rng=None, state=None, loss_scale=None, **keywords) -> Gradients:
        check_call(loss_fn, params, () if batch is _NOT_GIVEN else (batch, *extra), keywords, num_micro_batches)
        module = None
        if is_nnx_object(params):
            module = NnxCall(loss_fn, params, (batch, *extra), keywords, wrt, has_aux, state)
            params, state, (batch, *extra), keywords = module.params, module.state, module.args, module.keywords
        elif wrt is not None:
            raise ConfigError(
                wanted="wrt with an nnx module as the first argument",
                got=f"a {type(params).__name__}",
                do="Leave it out: all parameters are differentiated.",
            )
        check_differentiable(params)
        names = _reduce.state_reductions(state_reduction, state)
        shards = Shards.of(data_sharding, batch_axes)
        parts = num_micro_batches * shards.count
        made = loss_fn if module is None else module.loss
        arguments = Arguments.of(made, batch, tuple(extra), keywords, axes=batch_axes, pad=pad, cut=parts > 1)
        loss: Any = arguments.loss if module is None else module.pure(arguments.loss)
        loss = AuxLoss(loss) if has_aux else loss
        batch, folds = arguments.batch, bool(extra or keywords)
        whole = Split.of(batch, 1, batch_axes=arguments.axes, pad=arguments.pad)
        if shards.count > 1:
            check_whole_rows(shards, whole, num_micro_batches)
            check_params(shards, params)

        def of_shard(batch, index, params, rng, state, loss_scale):
            split = Split.of(batch, num_micro_batches, batch_axes=arguments.axes, pad=arguments.pad)
            return accumulate(loss, split, folds, shards, names, params, batch, index, rng, state, loss_scale)

        value, grads, metrics, new_state, weights, added = shards.map(
            of_shard, batch, whole, params, rng, state, loss_scale
        )
        if loss_scale is not None:
            # In a wide dtype: in float16 a scale of 2**16 is infinite, and the quotient 0.
            with jax.named_scope(OPTIMIZER_SCOPE):  # so that reports recognise gradients
                wide = lambda g: g.astype(_reduce.sum_dtype(g.dtype))  # noqa: E731
                grads = jax.tree.map(lambda g: (w := wide(g)) / jnp.asarray(loss_scale, w.dtype), grads)
        grads = jax.tree.map(lambda g, p: g.astype(jnp.result_type(p)), grads, params)
        metrics, aux = _reduce.finish_metrics(metrics), None
        if has_aux:
            metrics, aux = loss.rebuilt(metrics, new_state, whole.size)
        if module is not None:
            module.update(new_state)
        return Gradients(
            value=value,
            grads=grads,
            metrics=metrics,
            state=new_state if module is None else new_state[0],
            weights=tuple(weight for weight in weights if weight is not None),
            finite=jnp.all(jnp.stack([jnp.all(jnp.isfinite(x)) for x in (value, *jax.tree.leaves(grads))])),
            added=added,
            aux=aux,
            has_aux=has_aux,
        )

    def accumulate(loss, split: Split, folds, shards: Shards, names, params, batch, index, rng, state, loss_scale):
        """Value, gradients, metrics, state and weights of one shard's rows, reduced over the shards."""
        batch, parts = split.pad(batch), num_micro_batches * shards.count
        key = shard_key(rng, index)
        key_of = lambda i: key if key is None or num_micro_batches == 1 else jax.random.fold_in(key, i)  # noqa: E731
        example = (params, split.take_padded(batch, 0), key_of(0), state)
        if parts > 1 and has_aux:
            find_outputs(loss, *example, split.axes, means=check_mean, padded=split.padded, shards=shards.count)
        traced = TracedLoss.of(loss, *example)
        check_weights(traced)
        if check_mean and parts > 1 and not _reads_rows(traced, lambda micro: micro.terms, split):
            raise BatchError(
                wanted="a loss that reads the batch it is given, which is cut into micro-batches",
                got=f"{getattr(loss, '__name__', 'a loss')}, which reads none of its rows",
                do="Read the argument, and not a variable of another name around the loss.",
            )
        checks = check_mean and not separable and not has_aux and parts > 1
        if checks and any(term.rule == "mean" for term in traced.out_shapes.terms):
            find_outputs(loss, *example, split.axes)
        take = functools.partial(split.take_padded, batch)
        if folds and parts > 1:
            take = folding(traced, split, batch, index)
        if split.padded:
            _check_paddable(traced, split)
        if shards.count > 1:
            check_local(traced, state, names, shards)
            if not separable and not {"mean", "sum", "max"} & set(jax.tree.leaves(names)):
                check_separable(loss, example, split.axes, shards.count)
        given, state = state, shard_state(state, index)

        if parts == 1:
            totals = None
        else:
            carried = jax.tree.map(lambda name: name == "carry", names)
            totals = shards.add(total_weights(traced, params, state, take, key_of, num_micro_batches, carried))

        def objective(params, batch, key, state):
            micro = traced(params, batch, key, state)
            value = _combine(micro.terms, totals, parts)
            return value if loss_scale is None else value * loss_scale, (value, micro)

        if num_micro_batches == 1:
            (_, (value, micro)), grads = jax.value_and_grad(objective, has_aux=True)(params, take(0), key_of(0), state)
            metrics = _reduce.add_metrics(_reduce.init_metrics(traced.out_shapes.metrics), micro.metrics)
            new_state = micro.state
            own = [None if t.weight is None else t.weight.astype(weight_dtype(t)) for t in micro.terms]
            weights = own if totals is None else totals
            added = None
        else:
            value, grads, metrics, new_state, added = add_up(
                objective,
                params,
                state,
                take=take,
                key_of=key_of,
                count=num_micro_batches,
                shapes=traced.out_shapes,
                state_names=names,
                accumulator_dtype=accumulator_dtype,
                in_place=in_place,
            )
            weights = totals or []
        if shards.count > 1:
            grads = jax.tree.map(lambda g: g.astype(jnp.promote_types(g.dtype, accumulator_dtype)), grads)
        with jax.named_scope(ACCUMULATE_SCOPE):
            value, grads = shards.add((value, grads))
        return (
            value,
            grads,
            shards.reduce_metrics(metrics),
            shards.reduce_state(given, new_state, names),
            weights,
            added,
        )

    # Not functools.wraps: jax.jit reads the signature for donate_argnames, so it must stay fn's own.
    fn.__name__ = fn.__qualname__ = getattr(loss_fn, "__name__", "loss")
    return fn


def _combine(terms, totals, parts: int):
    """The contribution of one of `parts` micro-batches to the objective, in at least float32."""
    value = 0.0
    for i, term in enumerate(terms):
        total = term.total.astype(_reduce.sum_dtype(term.total.dtype))
        if term.rule == "weighted":
            # A custom rule may return total and weight together; no gradient may reach it through the weight.
            total = _reduce.mean(total, jax.lax.stop_gradient(term.weight) if totals is None else totals[i])
        elif term.rule == "mean":
            total = total / parts if parts > 1 else total
        elif term.rule != "sum":
            raise NotImplementedError(f"how micro-batches of a term of rule {term.rule!r} combine")
        value = value + term.factor.astype(total.dtype) * total
    return value


def _check_paddable(traced: TracedLoss, split: Split) -> None:
    for i, term in enumerate(traced.out_shapes.terms):
        if term.rule == "mean":
            raise ObjectiveError(
                wanted="a weighted objective, since `pad` adds rows that must not count",
                got="a bare scalar, whose mean would count the padded rows",
                do="Return WeightedMean(total, weight) with weight 0 for padded rows.",
            )
        if term.rule == "weighted" and not _reads_rows(traced, lambda micro, i=i: micro.terms[i].weight, split):
            raise ObjectiveError(
                wanted="weights counted from the values of the batch, since `pad` adds rows that must not count",
                got=f"a weight of objective term {i} that is the same whatever the rows hold, such as their number",
                do="Count the valid rows, e.g. jnp.sum(labels != -100).",
            )


def _reads_rows(traced: TracedLoss, select: Callable, split: Split) -> bool:
    """Whether what `select` picks of a loss depends on the values of any leaf that is cut into micro-batches."""
    _, (_, batch_needs, *_) = traced.cut(select)
    needs = jax.tree.leaves(batch_needs, is_leaf=lambda x: x is None)
    return any(need and axis is not None for need, axis in zip(needs, split.axes, strict=True))
