"""`assert_equivalent`: a configuration against the plain step, on the user's own model and batch."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from jaxmem._shown import JsonRecord
from jaxmem.config import MemoryConfig
from jaxmem.errors import ConfigError, NotEquivalentError, RematWarning
from jaxmem.train._leaves import LeafDifference, leaf_differences, table
from jaxmem.train._state import TrainState
from jaxmem.train._step import make_train_step
from jaxmem.train._verify import NotCompared, Verifier
from jaxmem.workload import Workload


@dataclasses.dataclass(frozen=True, kw_only=True)
class Equivalence(JsonRecord, Sequence, identity=("worst_error", "tolerance", "dtype", "leaves", "reference")):
    """A config whose gradients are the plain step's; a sequence of its `leaves`.

    Args:
      leaves: the differences of the gradients, the worst first.
      reference: in words, what they are compared with.
      tolerance: relative L2 distance that a leaf may have.
      dtype: the narrowest at work, from which the tolerance is.
    """

    leaves: tuple[LeafDifference, ...]
    reference: str
    tolerance: float
    dtype: str

    @property
    def worst_error(self) -> float:
        """The relative error of the worst leaf; 0 without leaves."""
        return self.leaves[0].relative_error if self.leaves else 0.0

    def __getitem__(self, index):
        return self.leaves[index]

    def __len__(self) -> int:
        return len(self.leaves)

    def to_dict(self) -> dict[str, Any]:
        """All fields and the worst error, JSON-ready."""
        leaves = [{**dataclasses.asdict(leaf), "got": str(leaf.got), "expected": str(leaf.expected)} for leaf in self]
        return {**dataclasses.asdict(self), "leaves": leaves, "worst_error": self.worst_error}


def assert_equivalent(
    workload: Workload,
    config: MemoryConfig,
    *,
    mesh: Any = None,
    state: TrainState | None = None,
    batch: Any = None,
    rng: Any = None,
    tolerance: float | None = None,
) -> Equivalence:
    """Runs one step under a config and its plain reference, and raises where gradients, loss or model state differ.

    Made for a test of the user's own. The reference is the plain float32 step on the whole batch or, for a loss with
    model state or random numbers, plain micro-batches one by one, whose gradients are added up in float64.

    Args:
      workload: model, batch and optimizer.
      config: what is checked.
      mesh: as of `make_train_step`: that of the workload's arrays if not given.
      state: parameters, model state and key to start from; made from `rng` if not given.
      batch: one batch of arrays; the workload's own if not given. Shapes are filled with random numbers.
      rng: PRNG key; the workload's own if not given.
      tolerance: relative L2 distance that a leaf may have; if not given, what rounding makes of the narrowest dtype
        at work: 1e-4 in float32, 2e-2 in float16, 1e-1 in bfloat16.

    Returns:
      An `Equivalence`: the differences of the gradients, leaf by leaf, the worst first.

    Raises:
      NotEquivalentError: they differ; the message lists the worst leaves. It is an AssertionError.
      ConfigError: this machine has not the memory to compare, or the config's remat has no effect.

    >>> import jax.numpy as jnp, optax
    >>> from jaxmem import MemoryConfig, WeightedMean, Workload, assert_equivalent
    >>> batch = {"x": jnp.arange(4.0), "mask": jnp.array([1, 0, 1, 1])}
    >>> def loss(w, b):
    ...     return WeightedMean(jnp.sum(b["mask"] * (b["x"] * w) ** 2), jnp.sum(b["mask"]))
    >>> workload = Workload(loss, jnp.ones(()), batch, optax.sgd(0.1))
    >>> assert_equivalent(workload, MemoryConfig(accumulation_steps=2))[0].relative_error < 1e-6
    True
    """
    step = make_train_step(workload, config, mesh=mesh)
    verifier = Verifier(state=state, batch=batch, rng=rng)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RematWarning)  # says what is kept, which is not the question here
        try:
            found = verifier.outcomes(step)
        except NotCompared as error:
            raise ConfigError(
                wanted="a step to run here beside its plain reference",
                got=str(error),
                do="Try a smaller model or batch, or another config.",
            ) from None
    limit = found.tolerance if tolerance is None else tolerance
    trees = {name: (getattr(found.got, name), getattr(found.expected, name)) for name in ("loss", "gradients", "state")}
    differences = {name: leaf_differences(*trees[name]) for name in trees}
    wrong = {
        name: [leaf for leaf in leaves if not leaf.relative_error <= limit] for name, leaves in differences.items()
    }
    if any(wrong.values()):
        counts = [f"{len(bad)} of {len(differences[name])} leaves of the {name}" for name, bad in wrong.items() if bad]
        lines = [f"{name}, by relative error:\n{table(bad)}" for name, bad in wrong.items() if bad]
        raise NotEquivalentError(
            wanted=f"what {found.reference} computes, to {limit:.0e} ({found.dtype})",
            got=f"other values in {' and '.join(counts)}",
            do=f"{_cause(config)}\n" + "\n".join(lines),
        )
    return Equivalence(
        leaves=differences["gradients"], reference=found.reference, tolerance=limit, dtype=str(found.dtype)
    )


def _cause(config: MemoryConfig) -> str:
    """What most often lies behind a difference."""
    if config.accumulation_steps > 1:
        return "Look whether the loss is a mean of means: WeightedMean(total, weight) says what to divide by."
    if jnp.dtype(config.dtypes.compute).itemsize < 4:
        return (
            f"Look whether plain JAX in {config.dtypes.compute} differs as much: then it is rounding, and `tolerance` "
            "says how much of it may be."
        )
    return "Look at what the leaves have in common."
