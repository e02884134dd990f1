"""`StepSpec`: what one optimizer step is made from, as a value. Everything else about the step follows from it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp

from jaxmem import accumulate, precision, remat
from jaxmem._miscompilations import Miscompilation, faults_met, without_faults
from jaxmem._settled import AS_WRITTEN, Settled
from jaxmem.config import MemoryConfig
from jaxmem.errors import ConfigError, WorkloadError
from jaxmem.jaxprs import Call
from jaxmem.policy import Policy
from jaxmem.remat.auto import ResidualPlan
from jaxmem.targets import one_device
from jaxmem.train._layout import Layout, sharding_of, unsharded
from jaxmem.train._loss import check_widths, configured_loss, partition
from jaxmem.workload import Workload, is_creator


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class StepSpec:
    """A workload, how it is trained and where its arrays lie.

    Args:
      workload: what is trained.
      config: how.
      layout: where state and batches lie on a mesh.
      decision: which residuals a remat budget keeps; None without a budget, or before it was spent.
      settled: the form of the step on a target, see `_settle.py`; None before one is known.
      plain: the spec without remat that others share; None where each has its own.
      known: results of functions of this spec, see `once`.
    """

    workload: Workload
    config: MemoryConfig
    layout: Layout
    decision: ResidualPlan | None = None
    settled: Settled | None = None
    plain: "StepSpec | None" = None
    known: dict[Any, Any] = dataclasses.field(default_factory=dict, init=False, repr=False)

    @classmethod
    def of(cls, workload: Workload, config: MemoryConfig | None = None, mesh: Any = None) -> "StepSpec":
        """A spec without a decision, checked.

        Raises:
          WorkloadError, ConfigError, MeshError: for what is none, or does not fit together.
        """
        if not isinstance(workload, Workload):
            raise WorkloadError(
                wanted="a jaxmem.Workload",
                got=type(workload).__name__,
                do="Make one with Workload(loss_fn, params, batch, optimizer), from_linen or from_nnx.",
            )
        config = MemoryConfig() if config is None else config
        if not isinstance(config, MemoryConfig):
            fields = f"remat={config!r}" if isinstance(config, (str, Policy)) else "..."
            raise ConfigError(
                wanted="a jaxmem.MemoryConfig", got=repr(config)[:200], do=f"Pass MemoryConfig({fields})."
            )
        check_widths(config)
        return cls(workload=workload, config=config, layout=Layout.of(workload, mesh))

    def with_remat(self, setting: Any) -> "StepSpec":
        """The spec under another remat setting, and without a decision."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, remat=setting), decision=None)

    def with_decision(self, decision: ResidualPlan) -> "StepSpec":
        """The spec with residuals kept as was decided, in the form in which blocks were found; its own remat setting
        must be none or a budget.
        """
        return dataclasses.replace(self, decision=decision, settled=decision.settled)

    def in_form(self, settled: Settled | None) -> "StepSpec":
        """The spec in a form; kept, so that what is known of it is found out once."""
        if settled == self.settled:
            return self
        return self.known.setdefault((StepSpec.in_form, settled), dataclasses.replace(self, settled=settled))

    def without_remat(self) -> "StepSpec":
        """The spec that keeps everything: itself, or the one that it shares with others."""
        if self.config.remat == "none" and self.decision is None:
            return self
        plain = self.plain or self.known.setdefault(StepSpec.without_remat, self.with_remat("none"))
        return plain.in_form(self.settled)

    @property
    def as_written(self) -> "StepSpec":
        """The spec that keeps everything, in the form in which its loss is written."""
        return self.without_remat().in_form(AS_WRITTEN)

    # -- the mesh ----------------------------------------------------------------------------------

    @property
    def mesh(self) -> Any:
        """The mesh that the step was asked for; None where its arrays say where they lie."""
        return self.layout.mesh if self.layout.asked else None

    @property
    def mesh_here(self) -> Any:
        """`mesh` for a step like this one that this machine can run: devices that are not here become one that is."""
        around = self.layout.around
        return self.mesh if around is None or self.layout.is_here else one_device(around)

    def entered(self, *arguments: Any):
        """Sets the step's mesh, for tracing a part of it and for calling it."""
        return self.layout.entered(*arguments)

    def put(self, batch: Any, *, uneven: bool = False) -> Any:
        """A batch where the step takes it: on its mesh, or as it is; `uneven` rows whole."""
        return batch if self.layout.mesh is None else self.layout.put(batch, self.abstract_batch, uneven=uneven)

    # -- shapes ------------------------------------------------------------------------------------

    @property
    def rng(self) -> Any:
        """The workload's key, or that of seed 0."""
        return jax.random.key(0) if self.workload.rng is None else self.workload.rng

    def given(self) -> list[Any]:
        """The workload's parameters and model state, None where a key creates them."""
        return [None if is_creator(tree) else tree for tree in (self.workload.params, self.workload.state)]

    def new_model(self, given: list[Any], rng: Any) -> tuple[Any, Any]:
        """Parameters and model state: copies of those `given`, or as a key creates them."""
        key = jax.random.fold_in(rng, jnp.uint32(2**32 - 1))  # no window has this index
        params, state = (
            create(key) if is_creator(create) else jax.tree.map(jnp.copy, tree)
            for create, tree in zip((self.workload.params, self.workload.state), given, strict=True)
        )
        dtype = self.config.dtypes.params
        return params if dtype is None else precision.cast_floating(params, dtype), state

    def abstract_given(self) -> tuple[list[Any], Any]:
        """Shapes of `given` and of the key: on the devices of a target none can be made."""
        return jax.tree.map(unsharded, self.given()), jax.eval_shape(lambda: self.rng)

    def abstract_model(self) -> tuple[Any, Any, Any]:
        """Shapes of parameters, model state and key."""
        given, rng = self.abstract_given()
        return *jax.eval_shape(self.new_model, given, rng), rng

    def abstract_params(self) -> Any:
        """Shapes of the parameters with the shardings that the workload's own have."""
        return like_given(self.abstract_model()[0], self.given()[0])

    def abstract_batch(self) -> Any:
        """Shapes and dtypes of the example batch."""
        return jax.eval_shape(lambda batch: batch, jax.tree.map(unsharded, self.workload.batch))

    @property
    def form(self) -> Settled:
        """The form of the step; as the loss is written, before one is known."""
        return self.settled or AS_WRITTEN

    # -- the loss ----------------------------------------------------------------------------------

    def loss(self, frozen: Any = None, *, checkpoint: Callable = remat.checkpoint_unchecked) -> Callable:
        """`configured_loss` of the spec's workload and config."""
        given = {"checkpoint": checkpoint, "decision": self.decision, "form": self.form}
        return configured_loss(self.workload, self.config, frozen, **given)

    def whole_loss(self, trainable, frozen, batch, rng, state) -> Any:
        """The loss as a function of everything that it depends on."""
        return self.loss(frozen)(trainable, batch, rng=rng, state=state)

    def loss_arguments(self) -> tuple[Any, ...]:
        """Shapes of what `whole_loss` is given for the first micro-batch: trainable, frozen, batch, rng, state."""
        split = functools.partial(
            accumulate.micro_batch,
            index=0,
            num_micro_batches=self.config.accumulation_steps,
            batch_axes=self.workload.batch_axes,
        )
        params, state, rng = self.abstract_model()
        trainable, frozen = partition(params, self.workload.trainable)
        return trainable, frozen, jax.eval_shape(split, self.abstract_batch()), rng, state

    # -- the compiler ------------------------------------------------------------------------------

    def compiler_options(self, platform: str) -> dict[str, Any] | None:
        """The workload's, with those that keep a platform's compiler from faults that this step would meet."""
        return without_faults(self.workload.compiler_options, self.faults_avoided(platform))

    def faults_avoided(self, platform: str) -> tuple[Miscompilation, ...]:
        """Known faults of a platform's compiler that this step would meet, did its compiler options not avoid them."""
        decided = self.decision is not None and self.decision.assignment.host_bytes > 0
        return faults_met(platform, offloads=decided or bool(self.config.policy.offload))


def once(fn: Callable[[StepSpec], Any]) -> Callable[[StepSpec], Any]:
    """A function of a spec that is computed once for each spec; its result is kept with the spec."""

    @functools.wraps(fn)
    def kept(spec: StepSpec) -> Any:
        if kept not in spec.known:
            spec.known[kept] = fn(spec)
        return spec.known[kept]

    return kept


@once
def loss_program(spec: StepSpec) -> jex.ClosedJaxpr:
    """`whole_loss` of the first micro-batch, traced in the form of the spec."""
    with spec.entered():
        return Call(spec.whole_loss, spec.loss_arguments(), {}).traced()


def like_given(shapes: Any, given: Any) -> Any:
    """Shapes with the shardings of arrays like them; an array on one device says nothing."""
    return shapes if given is None else jax.tree.map(_with_sharding_of, shapes, given)


def with_sharding(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    """A shape that says where it lies."""
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding, weak_type=shape.weak_type)


def _with_sharding_of(shape: jax.ShapeDtypeStruct, leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = sharding_of(leaf)
    return shape if sharding is None else with_sharding(shape, sharding)
