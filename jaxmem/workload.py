"""What is trained: a loss, its parameters, a batch and an optimizer."""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jaxmem._shown import Shown, arrays_in_words, name_of, one_line
from jaxmem._signatures import check_call, check_loss, is_train_state
from jaxmem.errors import BatchError, StateError, WorkloadError
from jaxmem.objective import LossOutput, WeightedMean

__all__ = ["LossOutput", "WeightedMean", "Workload"]

STATE_REDUCTIONS = ("carry", "mean", "sum", "max", "last")


@dataclasses.dataclass(frozen=True, eq=False)
class Workload(Shown):
    """A training problem, compared by identity.

    Args:
      loss_fn: `loss_fn(params, batch, *, rng, state, memory)`; it gets only the keywords that it
        declares and returns an objective or a `LossOutput`.
      params: pytree of arrays or `jax.ShapeDtypeStruct`, or a function of a PRNG key that makes it
        (then nothing is allocated before `step.init`).
      batch: one example batch: pytree of arrays or `jax.ShapeDtypeStruct`.
      optimizer: an `optax.GradientTransformation`.
      rng: PRNG key (typed, or raw uint32) for initialisation and for a loss that declares `rng`.
      state: model state that is not differentiated (BatchNorm statistics, RNG counts), or a
        function of a key that makes it.
      state_reduction: how micro-batches, and shards that accumulate locally, combine the state: "carry" (one after the
        other), "mean", "sum", "max" or "last"; a pytree prefix of the state, or a function `(path, leaf) -> name`.
      data: batches to train on: an iterable, or a function of the window index (which resumes
        exactly). With several processes see `per_process_data`.
      batch_axes: pytree prefix of `batch` with each leaf's example axis; None for a leaf that
        every micro-batch gets whole.
      trainable: what gets gradients, accumulators and optimizer moments; None for everything. A
        regular expression searched in each leaf's path ("decoder/.*/kernel"), a function
        `(path, leaf) -> bool`, or a pytree prefix of bools.
      param_shardings, choices, eval_fn, ema: reserved; anything but None is refused.
      compiler_options: XLA options for the compiled step.
      per_process_data: what a process of several gives in each batch of `data`. False: the whole batch, the same in
        all of them. True: its own rows, as many as lie on its devices, in the order of processes; of leaves without
        an example axis all of it, the same in all. `batch` is in both cases an example of the whole batch.

    Raises:
      WorkloadError: on an argument of the wrong kind.

    >>> import jax, jax.numpy as jnp, optax, jaxmem
    >>> def loss(params, batch):
    ...     error = batch["x"] @ params["w"] - batch["y"]
    ...     return jaxmem.WeightedMean(jnp.sum(error**2), error.size)
    >>> batch = {"x": jnp.ones((8, 4)), "y": jnp.zeros((8,))}
    >>> workload = jaxmem.Workload(loss, {"w": jnp.ones(4)}, batch, optax.sgd(0.1))
    >>> step = jaxmem.make_train_step(workload, jaxmem.MemoryConfig(accumulation_steps=4))
    >>> state, metrics = step(step.init(), batch)
    >>> float(metrics["loss"])
    16.0
    """

    loss_fn: Callable
    params: Any
    batch: Any
    optimizer: Any
    _: dataclasses.KW_ONLY
    rng: Any = None
    state: Any = None
    state_reduction: Any = "carry"
    data: Any = None
    batch_axes: Any = 0
    trainable: Any = None
    param_shardings: Any = None
    choices: Any = None
    eval_fn: Any = None
    ema: Any = None
    compiler_options: Any = None
    per_process_data: bool = False

    def __post_init__(self):
        if not callable(self.loss_fn):
            raise WorkloadError(
                wanted="loss_fn to be a function loss_fn(params, batch, ...)",
                got=f"{type(self.loss_fn).__name__}",
                do="Pass the loss function as the first argument of Workload.",
            )
        check_loss(self.loss_fn, "loss_fn(params, batch)")
        if is_train_state(self.params):
            raise WorkloadError(
                wanted="params to be what is trained",
                got=f"a {type(self.params).__name__}, which holds optimizer state, too",
                do="Pass its parameters and its optimizer: Workload(loss_fn, state.params, batch, state.tx).",
            )
        if not (hasattr(self.optimizer, "init") and hasattr(self.optimizer, "update")):
            raise WorkloadError(
                wanted="optimizer to be an optax.GradientTransformation",
                got=f"{type(self.optimizer).__name__}",
                do="Pass its transformation, state.tx or optimizer.tx."
                if hasattr(self.optimizer, "tx")
                else "Pass for example optax.adamw(1e-3) as the fourth argument of Workload.",
            )
        self._check_options()
        if not isinstance(self.per_process_data, bool):
            raise WorkloadError(
                wanted="per_process_data to be True or False", got=repr(self.per_process_data), do="Leave it out."
            )
        if not callable(self.state_reduction):
            check_reductions(self.state_reduction)
        for name in ("param_shardings", "choices", "eval_fn", "ema"):
            if getattr(self, name) is not None:
                raise WorkloadError(
                    wanted=f"{name}=None: this version of jaxmem does not act on it",
                    got=f"{type(getattr(self, name)).__name__}",
                    do=f"Leave {name} out.",
                )
        if is_creator(self.trainable):
            check_call(self.trainable, "trainable to be called as trainable(path, leaf)", 2)
        if callable(self.data) and not hasattr(self.data, "__iter__"):
            check_call(self.data, "data to be called as data(window_index)", 1)
        if self.rng is not None:
            check_key(self.rng)
        for name in ("params", "batch", "state"):
            tree = getattr(self, name)
            if name != "batch" and is_creator(tree):
                check_call(tree, f"a function of a key that makes {name}, called as {name}(key)", 1)
                continue
            for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
                if not is_array_like(leaf):
                    raise WorkloadError(
                        wanted=f"{name} to be a pytree of arrays or jax.ShapeDtypeStruct",
                        got=f"a {type(leaf).__name__} at {path_string(path, root=name)}",
                        do="Convert that leaf to an array, or move it out of the tree.",
                    )

        try:
            jax.tree.broadcast(self.batch_axes, self.batch, is_leaf=lambda x: x is None)
        except ValueError as error:
            raise BatchError(
                wanted="batch_axes to be a pytree prefix of the batch",
                got=str(error).splitlines()[0],
                do="Give batch_axes the structure of the batch, or a single value for all of its leaves.",
            ) from error

    def __repr__(self) -> str:
        made = is_creator(self.params)
        params = "(made from a key)" if made else arrays_in_words(self.params)
        shapes = (_short(leaf) for leaf in jax.tree.leaves(self.batch))
        batch = [("", text) for text in shapes]
        about = [("loss", name_of(self.loss_fn)), ("optimizer", optimizer_name(self.optimizer)), ("params", params)]
        return one_line("Workload", [*about, ("", "batch:"), *batch])

    def _check_options(self):
        options = self.compiler_options
        if options is None:
            return
        known = isinstance(options, Mapping) and all(isinstance(name, str) for name in options)
        bad = {k: v for k, v in options.items() if not isinstance(v, (bool, int, float, str))} if known else None
        if bad or not known:
            raise WorkloadError(
                wanted='compiler_options to be a dict of XLA\'s options, such as {"xla_dump_to": "folder"}',
                got=repr(bad or options),
                do="Its values are booleans, numbers and strings.",
            )

    @classmethod
    def from_linen(
        cls, module, loss_fn, batch, optimizer, *, rng=None, rng_streams=("dropout",), **workload_fields
    ) -> "Workload":
        """A workload of a `flax.linen` module.

        Parameters are created by running the loss in init mode; every other collection that this makes
        (`batch_stats`, …) becomes model state, mutable in every call and carried from micro-batch to micro-batch.

        Args:
          module: a linen module, or a function `memory -> module` that wraps its blocks with `memory.block`
            and computes in `memory.compute_dtype`.
          loss_fn: `loss_fn(model, batch, *, rng, memory)`, where `model` is the bound module: call it, or any of
            its methods. Returns an objective or a `LossOutput` without state.
          batch, optimizer, rng, **workload_fields: as in `Workload`.
          rng_streams: names of the module's RNG streams, or one name. The first gets the micro-batch's key itself, the
            others keys folded from it.

        >>> import flax.linen as nn, jax.numpy as jnp, optax
        >>> workload = Workload.from_linen(
        ...     nn.Dense(1), lambda model, x: jnp.mean(model(x) ** 2), jnp.ones((8, 4)), optax.sgd(0.1)
        ... )
        """
        from jaxmem._flax import linen_fields

        rng_streams = (rng_streams,) if isinstance(rng_streams, str) else tuple(rng_streams)
        fields = linen_fields(module, loss_fn, batch, rng_streams)
        return cls(batch=batch, optimizer=optimizer, rng=rng, **fields, **workload_fields)

    @classmethod
    def from_nnx(cls, model, loss_fn, batch, optimizer, *, wrt=None, rng=None, **workload_fields) -> "Workload":
        """A workload of a `flax.nnx` model.

        The model is split into parameters and state (BatchNorm statistics, RNG keys and counts, …) and merged,
        with copies, inside the transforms; the caller's object changes only in `step.update(model, state)`.

        Args:
          model: an nnx module, or a function `key -> module` (then nothing is allocated before `step.init`).
          loss_fn: `loss_fn(model, batch, *, rng, memory)`. Returns an objective or a `LossOutput` without state.
          batch, optimizer, rng, **workload_fields: as in `Workload`.
          wrt: nnx filter of what is differentiated; `nnx.Param` unless given.

        >>> import flax.nnx as nnx, jax.numpy as jnp, optax
        >>> workload = Workload.from_nnx(
        ...     nnx.Linear(4, 1, rngs=nnx.Rngs(0)), lambda model, x: jnp.mean(model(x) ** 2),
        ...     jnp.ones((8, 4)), optax.sgd(0.1),
        ... )  # fmt: skip
        """
        from jaxmem._flax import nnx_fields

        return cls(batch=batch, optimizer=optimizer, rng=rng, **nnx_fields(model, loss_fn, wrt), **workload_fields)


def is_array_like(leaf) -> bool:
    """Whether a leaf has a shape and a dtype, or is a Python number."""
    return (hasattr(leaf, "shape") and hasattr(leaf, "dtype")) or isinstance(leaf, (bool, int, float, complex))


def is_creator(tree) -> bool:
    """Whether it is a function of a key that makes a tree, and not a tree, which may be callable too."""
    return callable(tree) and jax.tree_util.all_leaves([tree])


def check_reductions(names) -> None:
    """StateError unless every leaf of a tree is the name of a state reduction, whether there is state or not."""
    for path, name in jax.tree_util.tree_leaves_with_path(names):
        if name not in STATE_REDUCTIONS:
            raise StateError(
                wanted=f"state_reduction to be one of {', '.join(STATE_REDUCTIONS)}",
                got=f"{name!r} for {path_string(path, root='state')}",
                do="Choose how micro-batches combine that leaf.",
            )


def check_key(rng) -> None:
    """WorkloadError unless it is one PRNG key."""
    if not _is_key(rng):
        raise WorkloadError(wanted="rng to be one PRNG key", got=_short(rng), do="Pass for example jax.random.key(0).")


def _is_key(value) -> bool:
    """Whether it is a single PRNG key: typed, or raw uint32."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        return False
    typed = jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)
    return value.shape == () if typed else value.dtype == np.uint32 and len(value.shape) == 1


def _short(value) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}{list(value.shape)}"
    return f"a {type(value).__name__}"


def optimizer_name(optimizer) -> str:
    """The names of the optax transformations that an optimizer is made of; those without state have none of their own.

    >>> import optax
    >>> optimizer_name(optax.chain(optax.clip(1.0), optax.adamw(1e-3)))
    'chain(scale_by_adam, add_decayed_weights)'
    """
    parts = [part for part in _parts(optimizer.init) if part not in ("identity", "init_empty_state")]
    return parts[0] if len(parts) == 1 else f"chain({', '.join(parts)})" if parts else "chain"


def _parts(init) -> list[str]:
    name = getattr(init, "__qualname__", type(init).__name__).partition(".<locals>")[0]
    if name != "chain" or not inspect.isfunction(init):
        return [name]
    held = inspect.getclosurevars(init).nonlocals.values()
    parts = next((each for each in held if isinstance(each, tuple) and all(map(callable, each))), ())
    return [inner for part in parts for inner in _parts(part)]


def path_string(path, *, root: str = "") -> str:
    """`root/a/0/b` for a key path, as used in filters and error messages.

    The attribute `value` in which an nnx variable holds its array is left out, so that a linen and an nnx model
    have the same paths.
    """
    if path and path[-1] == jax.tree_util.GetAttrKey("value"):
        path = path[:-1]
    tail = jax.tree_util.keystr(path, simple=True, separator="/")
    return "/".join(part for part in (root, tail) if part)
