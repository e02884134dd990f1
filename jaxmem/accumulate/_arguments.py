"""The arguments of a loss beside its parameters, `loss(params, x, y, key, train=True)`, as one batch."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jaxmem._compat import called_jaxprs
from jaxmem._flax import is_a
from jaxmem._signatures import argument_names, check_order, declares, is_train_state
from jaxmem.accumulate._shards import is_key
from jaxmem.accumulate._split import Split
from jaxmem.accumulate._trace import TracedLoss
from jaxmem.errors import BatchError, InputError

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Arguments:
    """What a loss is called with, as one batch of arrays.

    Args:
      loss: `loss(params, batch, *, rng, state)` of that batch.
      batch: by name of the argument; None in place of what is no array.
      axes, pad: a prefix of the batch each.
    """

    loss: Callable
    batch: Any
    axes: Any
    pad: Any

    @classmethod
    def of(cls, loss_fn, batch, extra: tuple, keywords: dict, *, axes, pad, cut: bool) -> "Arguments":
        """The arguments of `loss_fn(params, batch, *extra, **keywords)`.

        Args:
          axes, pad: of the batch; or a tuple with one entry for the batch and for each of `extra`.
          cut: the rows are cut into micro-batches or shards, so that it matters which arguments have rows.

        Raises:
          BatchError: an argument that may have rows, and of which `axes` does not say.
        """
        if not extra and not keywords:
            return cls(loss=loss_fn, batch=batch, axes=axes, pad=pad)
        names = argument_names(loss_fn, 2 + len(extra))
        given = dict(zip(names[1:], (batch, *extra), strict=True))
        arguments = {**given, **keywords}
        declared = isinstance(axes, tuple) and len(axes) == len(given)
        if not declared and isinstance(axes, tuple) and not isinstance(batch, tuple):
            raise BatchError(
                wanted=f"batch_axes with one entry for each of the arguments {', '.join(given)}",
                got=f"{axes!r}",
                do=f"For example batch_axes={_example(given, {})}.",
            )
        first = names[1]
        of = dict(zip(given, axes, strict=True)) if declared else {first: axes}
        each = isinstance(pad, tuple) and len(pad) == len(given)
        fills = dict(zip(given, pad, strict=True)) if each else {first: pad}
        if not declared:
            if _is_key(batch):
                raise BatchError(
                    wanted=f"a batch as the argument after the parameters, {first!r}",
                    got="a PRNG key",
                    do=f"Say which arguments have rows: batch_axes={_example(given, {first: None})}.",
                )
            size = Split.of(batch, 1, batch_axes=axes, pad=None).size
            for name, value in arguments.items():
                if name != first:
                    of[name] = None
                    _check_undeclared(name, value, size if cut else None, given, axes, loss_fn)
        of |= dict.fromkeys(set(keywords) - set(of))
        held = {name: jax.tree.flatten(value, is_leaf=_is_none) for name, value in arguments.items()}
        arrays = {
            name: tree.unflatten([leaf if isinstance(leaf, _ARRAYS) else None for leaf in leaves])
            for name, (leaves, tree) in held.items()
        }
        own = [name for name in ("rng", "state") if name not in (*names, *keywords) and declares(loss_fn, name)]

        def loss(params, batch, *, rng, state):
            def value(name):
                leaves, tree = held[name]
                new = jax.tree.leaves(batch[name], is_leaf=_is_none)
                return tree.unflatten([b if isinstance(a, _ARRAYS) else a for a, b in zip(leaves, new, strict=True)])

            named = {name: value(name) for name in keywords}
            named |= {name: {"rng": rng, "state": state}[name] for name in own}
            return loss_fn(params, *map(value, given), **named)

        loss.__name__ = getattr(loss_fn, "__name__", "loss")
        prefixes = {
            "axes": {name: of[name] for name in arguments},
            "pad": {name: fills.get(name) for name in arguments},
        }
        return cls(loss=loss, batch=arrays, **prefixes)


def folding(traced: TracedLoss, split: Split, batch: Any, shard: Any) -> Callable[[Any], Any]:
    """`split.take_padded` of a batch, with the shard's and the micro-batch's index folded into the PRNG keys.

    Typed keys are known by their type, and integers as `jax.random.PRNGKey` makes them by their use.
    """
    _, given, _, _ = jax.tree.unflatten(traced.in_tree, traced.jaxpr.jaxpr.invars)
    used = _wrapped(traced.jaxpr.jaxpr)
    leaves, tree = jax.tree.flatten(batch, is_leaf=_is_none)
    variables = jax.tree.leaves(given, is_leaf=_is_none)
    keys = [
        axis is None and leaf is not None and (is_key(leaf) or variable in used)
        for leaf, axis, variable in zip(leaves, split.axes, variables, strict=True)
    ]

    def fold(tree_of, index):
        leaves = jax.tree.leaves(tree_of, is_leaf=_is_none)
        return tree.unflatten([_fold(x, index) if key else x for x, key in zip(leaves, keys, strict=True)])

    batch = batch if shard is None else fold(batch, shard)
    if split.num_micro_batches == 1:
        return lambda index: batch
    return lambda index: fold(split.take_padded(batch, index), index)


def _fold(key, index):
    fold = jax.random.fold_in
    for _ in range(key.ndim if is_key(key) else 0):
        fold = jax.vmap(fold, (0, None))
    return fold(key, index)


def _wrapped(jaxpr: jex.Jaxpr) -> set:
    """The variables of a program that it uses as PRNG keys though they are integers."""
    found: set = set()
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "random_wrap":
            found.update(v for v in eqn.invars if isinstance(v, jex.Var))
        for inner in called_jaxprs(eqn):
            used = _wrapped(inner)
            pairs = zip(reversed(eqn.invars), reversed(inner.invars), strict=False)  # a cond's first is the branch
            found.update(outer for outer, v in pairs if v in used and isinstance(outer, jex.Var))
    return found


def check_call(loss_fn: Callable, params: Any, given: tuple, keywords: dict, count: int) -> None:
    """InputError where a loss cannot be called with what was given, or where that is no parameters."""
    name = getattr(loss_fn, "__name__", "loss")
    line = f"accumulate.value_and_grad({name}, {count})"
    first = "the parameters, or an nnx module, as the first argument, which is differentiated"
    if is_train_state(params):
        what = "state.params" if hasattr(params, "params") else "model"
        raise InputError(wanted=first, got=f"a {type(params).__name__}", do=f"Write {line}({what}, batch).")
    if is_a(type(params), "flax.linen", "Module"):
        do = f"Write {line}(params, batch), with params = model.init(key, x)['params']."
        raise InputError(wanted=first, got=f"the linen module {type(params).__name__}, which holds none", do=do)
    check_order(loss_fn, "loss(params, batch)")
    if not given:
        raise InputError(
            wanted="a batch after the parameters, since that is what is cut into micro-batches",
            got=f"{name} called with its parameters only",
            do=f"Make the batch an argument of the loss, def {name}(params, batch), rather than a variable round it, "
            f"and pass it: {line}(params, batch).",
        )
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # such as some builtins
        return
    own = [key for key in ("rng", "state") if key not in keywords and declares(loss_fn, key)]
    try:
        try:
            signature.bind(params, *given, **keywords)
        except TypeError:
            signature.bind(params, *given, **keywords, **dict.fromkeys(own))
    except TypeError as error:
        raise InputError(
            wanted=f"the arguments of {name}{signature}",
            got=f"{1 + len(given)} by position" + (f", and {', '.join(keywords)}" if keywords else "") + f" ({error})",
            do=f"Pass all of them, as jax.value_and_grad has it: {line}(params, batch, key). Functions and modules may "
            "be among them.",
        ) from None


def _check_undeclared(name: str, value: Any, size: int | None, given: dict, axes: Any, loss_fn) -> None:
    """BatchError for an array that may have rows: the length of one of its axes is a multiple of the batch's size."""
    if size is None:
        return
    own = {axes} if isinstance(axes, int) else {0, *(a for a in jax.tree.leaves(axes) if isinstance(a, int))}
    for leaf in jax.tree.leaves(value):
        shape = tuple(leaf.shape) if isinstance(leaf, _ARRAYS) else ()
        if any(-len(shape) <= axis < len(shape) and shape[axis] and shape[axis] % size == 0 for axis in own):
            if name in given:
                rows = {k: 0 if _has_rows(v, size) else None for k, v in given.items()}
                line = _example(given, rows | {next(iter(given)): axes})
                do = f"Say so: accumulate.value_and_grad({loss_fn.__name__}, K, batch_axes={line}) cuts the arguments "
                do += "that have a number into micro-batches, and passes the others whole."
            else:
                do = f"Give {name} by position, so that batch_axes, with one entry for each argument, can say."
            raise BatchError(
                wanted="to know which arguments of the loss have rows, since those are cut into micro-batches",
                got=f"{name} of shape {shape} beside a batch of {size} rows: it may have rows or not",
                do=do,
            )


def _has_rows(value: Any, size: int) -> bool:
    leaves = [leaf for leaf in jax.tree.leaves(value) if isinstance(leaf, _ARRAYS)]
    return any(leaf.shape and leaf.shape[0] == size for leaf in leaves) and not _is_key(value)


def _example(given: dict, known: dict) -> str:
    entries = [repr(known[k] if k in known else None if _is_key(v) else 0) for k, v in given.items()]
    return f"({', '.join(entries)})"


def _is_key(value: Any) -> bool:
    if not isinstance(value, _ARRAYS):
        return False
    return is_key(value) or (value.dtype == jnp.uint32 and value.ndim == 1)


def _is_none(x: Any) -> bool:
    return x is None
