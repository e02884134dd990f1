"""How a workload is trained: `MemoryConfig`, and the `memory` handle that a loss receives."""

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxmem._installed import version
from jaxmem._settled import SETTINGS
from jaxmem._shown import Brief
from jaxmem._suggest import meant, named_fields
from jaxmem.budget import PREFIX, Budget, is_auto, parse_budget
from jaxmem.errors import ConfigError, UnknownFieldError
from jaxmem.loss_scale import DynamicLossScale, as_loss_scale
from jaxmem.policy import Policy, as_policy, shortest

CONFIG_VERSION = 1
FLOAT_DTYPES = ("float32", "bfloat16", "float16", "float64")
_SHORT_DTYPES = {
    **dict.fromkeys(("bf16", "brain", "mixed", "mixed_bfloat16"), "bfloat16"),
    **dict.fromkeys(("fp16", "f16", "mixed_float16"), "float16"),
    **dict.fromkeys(("fp32", "f32", "tf32", "full"), "float32"),
    **dict.fromkeys(("fp64", "f64"), "float64"),
}
_OTHER_FIELDS = {"dtype": "precision", "policy": "remat", "checkpoint": "remat", "micro_batches": "accumulation_steps"}


@named_fields(_OTHER_FIELDS)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision(Brief):
    """The dtypes of a training step.

    Args:
      params: dtype of the stored (master) parameters; None keeps the workload's.
      compute: dtype of parameters and batch in the loss.
      output: dtype of the loss and the metrics that a step returns; None keeps the dtype in which they are summed, at
        least float32.
      accumulator: dtype of gradient accumulators; None takes `MemoryConfig.accumulator_dtype`.
      optimizer: dtype in which optimizer state with the shape of the parameters (mu, nu, traces, averages) is stored
        between steps: "float32", "bfloat16" or "float64". The optimizer computes in at least float32. None keeps the
        optimizer's own dtypes.
      loss_scale: factor of the objective, by which its gradients are divided again: a number, "dynamic", or a
        `DynamicLossScale`. None is "dynamic" for float16 compute, where small gradients would become 0, and no scale
        for other dtypes. With any scale, even 1, a window whose loss or gradients are not finite is skipped.

    Raises:
      ConfigError: a value cannot be honoured.

    >>> Precision(compute="bfloat16").loss_scale
    >>> Precision(compute="float16").loss_scale
    DynamicLossScale(initial=32768.0, growth_interval=2000, factor=2.0, min=1.0, max=16777216.0)
    """

    params: str | None = None
    compute: str = "float32"
    output: str | None = None
    accumulator: str | None = None
    optimizer: str | None = None
    loss_scale: Any = None

    def __post_init__(self):
        for name in ("params", "compute", "output", "accumulator"):
            value = getattr(self, name)
            if value is not None or name == "compute":
                object.__setattr__(self, name, float_dtype_name(value, f"precision.{name}"))
        if self.optimizer is not None:
            why = "Second moments are squares of gradients: they need the range of float32, which bfloat16 has."
            among = ("float32", "bfloat16", "float64")
            object.__setattr__(
                self, "optimizer", float_dtype_name(self.optimizer, "precision.optimizer", among=among, why=why)
            )
        object.__setattr__(self, "loss_scale", as_loss_scale(self.loss_scale, self.compute))


@named_fields(_OTHER_FIELDS)
@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig(Brief):
    """How a step is made to fit; equal by value, hashable, with a JSON round trip.

    Args:
      accumulation_steps: K, the number of micro-batches of one optimizer step.
      accumulator_dtype: dtype in which micro-batch gradients are summed. A parameter of a wider dtype, such as float64,
        is summed in its own, unless 16 bits such as "bfloat16" are asked for.
      gradient_reduction: when gradients of a sharded batch are reduced. "once": every shard accumulates its own
        gradients, and they are reduced after the last micro-batch (see `accumulate.value_and_grad`, `data_sharding`).
        "each": JAX reduces the gradients of every micro-batch. "auto" chooses; `step.report()` says which and why.
      remat: the residuals that each block saves, as a `Policy` or a preset's name: "none" (every residual), "full"
        (nothing inside a block), "dots" (outputs of matrix products), "dots_no_batch" (outputs of products without
        batch dimensions), or a preset of MaxText's, such as "minimal", which uses names in the model. Or a budget,
        under which residuals are chosen value by value: "auto:6GiB" bounds the compiled peak of the whole step,
        "auto:0.25" the residuals, as a share of the plain step's; "auto:0" is full remat.
      precision: compute dtype name, or a `Precision`. Master parameters keep their dtype; "float16" implies a dynamic
        loss scale.
      order: when weight gradients are made. "tied": before the backward pass goes on; "free": as the compiler likes.
        Neither changes a number. "auto" takes what was never seen to be worse on the target, such as a tie at the
        head alone; under a budget, and in a comparison that asks, what a compile shows.
      roll: True runs repeated unrolled layers as one scan inside the step; results stay within rounding. "auto" as for
        `order`.
      random: "fenced" draws the masks of dropout once, a byte an element, fused into nothing; "free" leaves them to the
        compiler. Neither changes a number. "auto" as for `order`.
      generator: of the random numbers that a step draws with its key: the key's own ("given"), "rbg" (the hardware's,
        fast on a TPU) or "threefry2x32". Another generator draws other numbers; those of "rbg" depend on the chip, the
        sharding and the version of XLA. The state keeps its own keys.
      zero: reserved; only 0.
      offload: reserved; only ().

    Raises:
      ConfigError: a value cannot be honoured.
      UnknownPolicyError: there is no preset of the name in `remat`.

    >>> config = MemoryConfig(accumulation_steps=8, remat="full", precision="bfloat16")
    >>> MemoryConfig.from_json(config.to_json()) == config
    True
    """

    accumulation_steps: int = 1
    accumulator_dtype: str = "float32"
    gradient_reduction: str = "auto"
    remat: str | Policy = "none"
    precision: str | Precision = "float32"
    order: str = "auto"
    roll: str | bool = "auto"
    random: str = "auto"
    generator: str = "given"
    zero: int = 0
    offload: tuple[str, ...] = ()

    def __post_init__(self):
        object.__setattr__(self, "accumulation_steps", step_count(self.accumulation_steps, "accumulation_steps"))
        object.__setattr__(self, "accumulator_dtype", float_dtype_name(self.accumulator_dtype, "accumulator_dtype"))
        if not isinstance(self.precision, Precision):
            object.__setattr__(self, "precision", float_dtype_name(self.precision, "precision"))
        elif self.precision.accumulator is not None:
            if self.accumulator_dtype not in ("float32", self.precision.accumulator):
                raise ConfigError(
                    wanted="accumulator_dtype and precision.accumulator to agree",
                    got=f"{self.accumulator_dtype!r} and {self.precision.accumulator!r}",
                    do="Set one of them.",
                )
            object.__setattr__(self, "accumulator_dtype", self.precision.accumulator)
        if self.precision == Precision(compute=self.dtypes.compute):  # so that both spellings are equal
            object.__setattr__(self, "precision", self.dtypes.compute)
        budget = self.budget
        setting = shortest(as_policy(self.remat)) if budget is None else f"{PREFIX}{budget}"
        object.__setattr__(self, "remat", setting)  # likewise
        for name, (settings, do) in SETTINGS.items():
            value = getattr(self, name)
            # 1 == True, and a list is in no tuple of strings: by identity of the type, too.
            if not any(value == each and type(value) is type(each) for each in settings):
                raise ConfigError(
                    wanted=f"{name} to be one of {', '.join(map(repr, settings))}", got=repr(value), do=do
                )
        for name, neutral in (("zero", 0), ("offload", ())):
            value = getattr(self, name)
            value = tuple(value) if name == "offload" and isinstance(value, (list, tuple)) else value
            if value != neutral or type(value) is not type(neutral):
                raise ConfigError(
                    wanted=f"{name}={neutral!r}: this version of jaxmem does not act on it",
                    got=repr(value),
                    do=f"Leave {name} out.",
                )
            object.__setattr__(self, name, value)

    @property
    def dtypes(self) -> Precision:
        """The precision as a `Precision`, with its accumulator dtype filled in."""
        precision = self.precision
        if isinstance(precision, str):
            precision = Precision(compute=precision)
        return dataclasses.replace(precision, accumulator=self.accumulator_dtype)

    @property
    def policy(self) -> Policy:
        """The remat setting as a `Policy`; "none" under a budget, which marks no blocks."""
        return as_policy("none" if self.budget is not None else self.remat)

    @property
    def recomputes(self) -> bool:
        """Whether remat is asked for."""
        return self.budget is not None or not self.policy.keeps_everything

    @property
    def budget(self) -> Budget | None:
        """The budget for residuals if the remat setting is one; None otherwise."""
        return parse_budget(self.remat) if isinstance(self.remat, str) and is_auto(self.remat) else None

    def to_json(self) -> str:
        """One line of JSON with a version; `from_json` makes an equal config from it."""
        return json.dumps({"version": CONFIG_VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> "MemoryConfig":
        """The config that `to_json` wrote; ConfigError for an unknown field or version, as a newer jaxmem writes."""
        try:
            fields = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(
                wanted="a MemoryConfig as JSON", got=f"invalid JSON ({error})", do="Check the file."
            ) from None
        if not isinstance(fields, dict):
            raise ConfigError(
                wanted="a JSON object of MemoryConfig fields",
                got=f"a JSON {type(fields).__name__}",
                do='Write for example {"accumulation_steps": 8, "remat": "full"}.',
            )
        written = fields.pop("version", CONFIG_VERSION)
        if written != CONFIG_VERSION or isinstance(written, (bool, float)):
            raise ConfigError(
                wanted=f"a MemoryConfig of version {CONFIG_VERSION}",
                got=f"version {written!r}",
                do=f"Write it again with this jaxmem, {version('jaxmem')}, or read it with the one that wrote it.",
            )
        precision = fields.get("precision")
        if isinstance(precision, dict):
            if isinstance(precision.get("loss_scale"), dict):
                precision["loss_scale"] = _from_fields(DynamicLossScale, precision["loss_scale"])
            fields["precision"] = _from_fields(Precision, precision)
        if isinstance(fields.get("remat"), dict):
            fields["remat"] = _from_fields(Policy, fields["remat"])
        return _from_fields(cls, fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory(Brief):
    """The handle that a loss declares as `memory`: equal by value, passed explicitly.

    It is never ambient: jit caches a trace by its arguments, so a policy in a context variable would go stale.

    Args:
      remat: the policy, or the name of the preset, that `block` applies.
      compute_dtype: the dtype that a model should compute in, e.g. flax's `dtype=memory.compute_dtype`.
      checkpoint: `checkpoint(target, remat, **options)`; `make_train_step` passes jaxmem's own.

    >>> Memory().block(len) is len  # remat="none" does not change a block
    True
    """

    remat: str | Policy = "none"
    compute_dtype: Any = dataclasses.field(default_factory=lambda: np.dtype(np.float32))
    checkpoint: Callable | None = None

    def block(self, target, **options):
        """`target` – a function, a linen or nnx module or class, a bound method – under the remat setting.

        Options are those of `jaxmem.remat.checkpoint`; `scanned=True` says that the block is the
        body of a `lax.scan`, which needs no barrier against common-subexpression elimination.
        """
        if self.checkpoint is None:
            if as_policy(self.remat) == as_policy("none"):
                return target
            raise ConfigError(
                wanted=f"a Memory made by make_train_step for remat={str(self.remat)!r}",
                got="a Memory without a checkpoint function",
                do="Pass Memory(remat=..., checkpoint=jaxmem.remat.checkpoint).",
            )
        return self.checkpoint(target, self.remat, **options)


def float_dtype_name(
    value,
    field: str,
    *,
    among: tuple[str, ...] = FLOAT_DTYPES,
    why: str = "Narrower ones, such as float8, need a scale for each array, which only the model can choose.",
) -> str:
    """The canonical name of a floating dtype to compute in; ConfigError for any other value."""
    try:
        name = jnp.dtype(value).name if value is not None else ""
    except TypeError:
        name = ""
    if name not in among:
        close = meant(value, among, aliases=_SHORT_DTYPES) if not name else None
        raise ConfigError(
            wanted=f"{field} to be a floating dtype of {', '.join(among)}",
            got=repr(value),
            do=f"Did you mean {close}?" if close in among else why,
        )
    return name


def step_count(value: Any, field: str) -> int:
    """A number of micro-batches, at least 1, as an int; ConfigError for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ConfigError(
            wanted=f"{field} to be a whole number of at least 1", got=repr(value), do="Use 1 for no accumulation."
        )
    return int(value)


def _from_fields(cls, fields: dict):
    try:
        return cls(**fields)
    except UnknownFieldError as error:
        newer = f"Where a newer jaxmem wrote it, read it with that one; this is {version('jaxmem')}."
        raise UnknownFieldError(wanted=error.wanted, got=error.got, do=f"{error.do} {newer}") from None
