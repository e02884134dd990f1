"""`make_train_step`: a workload and a config become one jitted, donated optimizer step."""

import dataclasses
import functools
import warnings
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

from jaxmem import accumulate, precision, remat
from jaxmem._miscompilations import Miscompilation, faults_met, without_faults
from jaxmem._scopes import OPTIMIZER_SCOPE
from jaxmem.budget import parse_budget
from jaxmem.config import MemoryConfig
from jaxmem.errors import ConfigError, RematWarning, SettingWarning, WorkloadError
from jaxmem.policy import Policy
from jaxmem.remat.auto import MAX_COMPILES, ResidualPlan
from jaxmem.targets import Target, compile_lowered, on_target, one_device, place, refusing_options, resolve_target
from jaxmem.train._budget import Tried, decide, fit_step, pose_step
from jaxmem.train._layout import Layout, sharding_of, unsharded
from jaxmem.train._loss import check_precision, check_widths, configured_loss, merge, partition, state_reductions
from jaxmem.train._mistakes import blaming, check_state, guarded
from jaxmem.train._reduction import Reduction, choose_reduction
from jaxmem.train._remat import compare_residuals, examine_step
from jaxmem.train._settings import idle_settings
from jaxmem.train._skip import check_metric_names, current_scale, scaling_metrics, skip_unless
from jaxmem.train._state import TrainState
from jaxmem.workload import Workload, check_key, is_creator, path_string

if TYPE_CHECKING:
    from jaxmem.analysis import CompiledProgram, MemoryReport


def make_train_step(
    workload: Workload,
    config_or_plan: MemoryConfig | None = None,
    *,
    mesh: Any = None,
    target: str | Target | None = None,
) -> "TrainStep":
    """One optimizer step of a workload: micro-batches, remat and precision as the config says.

    Args:
      workload: what is trained.
      config_or_plan: how, a `MemoryConfig`; the default is the plain step.
      mesh: a `jax.sharding.Mesh`. The rows of every batch are sharded over the axes that those of the workload's
        example batch are, else over the mesh's axis "data", or its first; parameters lie as the workload's own arrays
        do, else whole on every device; `step.init` puts the state there, and the mesh is set while the loss is traced.
        If not given, the mesh of the workload's arrays, where they are sharded over one.
      target: name of the chip that `step.lower()`, `.compile()` and `.report()` are for, such as "tpu-v5e:1x1"; None
        for the machine's own. Running the step always means this machine.

    Under a budget (`remat="auto:6GiB"`) the step is compiled for its target a few times before this returns.

    Settings that do nothing for the workload are said by a SettingWarning.

    Raises:
      BudgetInfeasible: no choice of residuals keeps the peak within the budget.
      ConfigError: for what this version does not act on. When the step is traced, RematWithoutEffect: a remat
        setting for a loss that declares no `memory` and has nothing that repeats.
      MeshError: the workload's arrays lie on several meshes, or are sharded over axes that `mesh` lacks.

    >>> import jax.numpy as jnp, optax
    >>> from jaxmem import MemoryConfig, Workload, make_train_step
    >>> workload = Workload(lambda w, x: jnp.mean((x * w) ** 2), jnp.ones(()), jnp.ones(8), optax.sgd(0.1))
    >>> step = make_train_step(workload, MemoryConfig(accumulation_steps=2))
    >>> state, metrics = step(step.init(), workload.batch)
    >>> float(metrics["loss"]), round(float(state.params), 6)
    (1.0, 0.8)
    """
    step = build_step(workload, config_or_plan, mesh=mesh, target=target)
    for message in step.idle_settings:
        warnings.warn(message, SettingWarning, stacklevel=2)
    return step


def build_step(
    workload: Workload,
    config_or_plan: MemoryConfig | None = None,
    *,
    mesh: Any = None,
    target: str | Target | None = None,
) -> "TrainStep":
    """`make_train_step` without its warnings: for steps beside one that was made, and for reports, which have notes."""
    if not isinstance(workload, Workload):
        raise WorkloadError(
            wanted="a jaxmem.Workload",
            got=type(workload).__name__,
            do="Make one with Workload(loss_fn, params, batch, optimizer), from_linen or from_nnx.",
        )
    config = MemoryConfig() if config_or_plan is None else config_or_plan
    if not isinstance(config, MemoryConfig):
        raise ConfigError(wanted="a jaxmem.MemoryConfig", got=repr(config), do="Pass MemoryConfig(...).")
    check_widths(config)
    step = TrainStep(workload, config, target, mesh)
    if config.budget is None:
        return step
    resolved = resolve_target(target)
    spent = decide(step, config.budget, resolved)
    step = step.with_decision(spent.decision)
    step.made = spent.made and (resolved, spent.made)
    return step


class TrainStep:
    """`step(state, batch) -> (state, metrics)`, jitted, with `state` donated; made by `make_train_step`."""

    def __init__(
        self,
        workload: Workload,
        config: MemoryConfig,
        target: str | Target | None,
        mesh: Any = None,
        decision: ResidualPlan | None = None,
        tried: dict[Target, Tried] | None = None,
    ):
        self.workload, self.config, self.target, self.mesh = workload, config, target, mesh
        self.decision = decision  # what a remat budget was spent on
        self.made: tuple[Target, CompiledProgram] | None = None  # what a target's compiler made of it for a budget
        self._tried = {} if tried is None else tried  # by `fit_budget`
        self._layout = Layout.of(workload, mesh)
        self._examination = self._reduction = None
        self.added: accumulate.Added | None = None  # how gradients are added up, once the step has been traced

    @functools.cached_property  # the default backend is asked for once something is traced
    def _jitted(self):
        options = self.compiler_options(resolve_target(None).platform)  # it runs here, whatever it is compiled for
        return jax.jit(self._step, donate_argnums=0, compiler_options=options)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step on a batch; `state` is donated. Metrics hold "loss" and the loss's own.

        With a loss scale also "loss_scale", that of this window, and "skipped", windows skipped so far: one whose loss
        or gradients are not finite changes neither parameters nor optimizer state nor model state.
        """
        with blaming(self, state, batch), refusing_options(self.workload.compiler_options):
            placed = self.put(batch)
            with self._layout.entered(state, placed):
                return self._jitted(state, placed)

    def init(self, rng: Any = None) -> TrainState:
        """A new state, on the step's mesh or the default device.

        Arrays of the workload are copied, since the step donates its state.

        Args:
          rng: PRNG key; the workload's own, else `jax.random.key(0)`, if not given.
        """
        for name in ("params", "state"):
            for path, leaf in jax.tree_util.tree_leaves_with_path(getattr(self.workload, name)):
                if isinstance(leaf, jax.ShapeDtypeStruct):
                    raise WorkloadError(
                        wanted="arrays, or a function of a key that makes them, to train on",
                        got=f"only a shape at {path_string(path, root=name)}",
                        do="Give the workload real parameters; shapes are enough for analyze and compare.",
                    )
        rng = self._rng if rng is None else rng
        check_key(rng)
        # Inside jit, so that what a key creates is allocated once, where it belongs.
        places = None if self._layout.mesh is None else self._layout.state(self.abstract_arguments()[0])
        with blaming(self), self._layout.entered(rng):
            return jax.jit(self._init, out_shardings=places)(self._given(), rng)

    def trace(self) -> jax.stages.Traced:
        """The step traced on an abstract state and the workload's example batch."""
        if self._layout.mesh is None:
            with blaming(self):
                return self._jitted.trace(self.abstract_state(), self.abstract_batch())
        with blaming(self), self._layout.entered():
            return self._jitted.trace(*self.abstract_arguments())

    def trace_for(self, target: Target) -> tuple[jax.stages.Traced, Target, tuple[str, ...]]:
        """The step traced for a target, the target with the mesh of the batch's sharding, and notes about both."""
        placed, jitted = place(self.abstract_arguments(), target), self._jitted  # made where this machine is asked for
        with on_target(placed.target) as scope, blaming(self), self._layout.entered():
            self.examine()
            traced = jitted.trace(*placed.args)
        return traced, placed.target, (*placed.notes, *scope.notes)

    def lower(self) -> jax.stages.Lowered:
        """The traced step lowered for the step's target: the default backend, unless it was given one."""
        if self.target is None:
            return self.trace().lower()
        traced, target, _ = self.trace_for(resolve_target(self.target))
        with on_target(target):
            return traced.lower()

    def compile(self) -> jax.stages.Compiled:
        """The step compiled for its target: this machine, unless it was given one.

        Raises:
          MiscompiledError: the compiler made it compute wrong numbers, in a way that is known.
        """
        from jaxmem.analysis import check_compiled  # most steps are never compiled by themselves

        target = resolve_target(self.target)
        compiled = compile_lowered(self.lower(), target, self.compiler_options(target.platform))
        check_compiled(compiled, target.platform, "step")
        return compiled

    def compiler_options(self, platform: str) -> dict[str, Any] | None:
        """The workload's, with what keeps a platform's compiler from faults of its own that this step would meet."""
        return without_faults(self.workload.compiler_options, self.faults_avoided(platform))

    def faults_avoided(self, platform: str) -> tuple[Miscompilation, ...]:
        """Known faults of a platform's compiler that this step would meet, did its compiler options not avoid them."""
        decided = self.decision is not None and self.decision.assignment.host_bytes > 0
        return faults_met(platform, offloads=decided or bool(self.config.policy.offload))

    def report(self) -> "MemoryReport":
        """What the compiled step needs, on the step's target."""
        from jaxmem.train._analysis import analyze

        return analyze(self, target=self.target)

    def solution(self) -> remat.Solution:
        """What a remat budget was spent on, value by value.

        Raises:
          ConfigError: the step has no budget.
        """
        if self.decision is None:
            raise ConfigError(
                wanted="a step under a remat budget",
                got=f"remat={self.config.remat!r}",
                do='Make it with MemoryConfig(remat="auto:6GiB"), or by remat.fit_budget.',
            )
        budget = self.config.budget
        with self.entered():
            return self.decision.solution(budget_bytes=None if budget is None else budget.bytes)

    def fit_budget(
        self,
        budget_peak_bytes: int | str,
        target: str | Target | None = None,
        *,
        offload: bool = False,
        max_compiles: int = MAX_COMPILES,
    ) -> "TrainStep":
        """As `remat.fit_budget`."""
        size = None if isinstance(budget_peak_bytes, bool) else parse_budget(budget_peak_bytes).bytes
        if not size:
            raise ConfigError(
                wanted="bytes for the compiled peak, such as 6 * 2**30 or '6GiB'",
                got=repr(budget_peak_bytes),
                do='For a share of the residuals use MemoryConfig(remat="auto:0.25").',
            )
        if isinstance(max_compiles, bool) or not isinstance(max_compiles, int) or max_compiles < 1:
            raise ConfigError(wanted="max_compiles of at least 1", got=repr(max_compiles), do="Leave it out.")
        target = self.target if target is None else target
        plain = TrainStep(self.workload, dataclasses.replace(self.config, remat="none"), target, self.mesh)
        resolved = resolve_target(target)
        if resolved not in self._tried:
            self._tried[resolved] = Tried(pose_step(plain, resolved))
        limits = {"offload": offload, "max_compiles": max_compiles}
        spent = fit_step(plain, size, resolved, self._tried[resolved], **limits)
        config = dataclasses.replace(self.config, remat=f"auto:{size}B")
        step = TrainStep(self.workload, config, target, self.mesh, spent.decision, self._tried)
        step.made = spent.made and (resolved, spent.made)
        return step

    def configured(self, **fields: Any) -> "TrainStep":
        """This step with other fields of its config."""
        config = dataclasses.replace(self.config, **fields)
        return build_step(self.workload, config, mesh=self.mesh, target=self.target)

    def with_decision(self, decision: ResidualPlan) -> "TrainStep":
        """This step with residuals kept as was decided; its own remat setting must be none or a budget."""
        return TrainStep(self.workload, self.config, self.target, self.mesh, decision)

    def update(self, model: Any, state: TrainState) -> None:
        """Writes the parameters and state of a workload made by `from_nnx` back to an nnx model, copied."""
        from flax import nnx

        if not isinstance(state.params, nnx.State):
            raise WorkloadError(
                wanted="a step whose workload was made by Workload.from_nnx",
                got=f"parameters of type {type(state.params).__name__}",
                do="Read state.params instead.",
            )
        nnx.update(model, *jax.tree.map(jnp.copy, (state.params, state.state)))

    def residuals(self, *, remat: str | Policy | None = None) -> remat.ResidualTable:
        """What the forward pass of one micro-batch keeps for its backward pass, value by value; modelled.

        Args:
          remat: setting to assume instead of the config's.

        Returns:
          The table; `before` holds the one of the plain loss, where there is a remat setting.
        """
        step = self._with_remat(remat)
        plain = step._with_remat("none")
        return step.examine().residuals if plain is step else compare_residuals(step, plain)

    def residual_bytes(self, *, remat: str | Policy | None = None) -> int:
        """Bytes on the device that the forward pass of one micro-batch keeps for its backward pass; modelled.

        Args:
          remat: setting to assume instead of the config's.
        """
        return self._with_remat(remat).examine().residuals.device_bytes

    def examine(self) -> remat.Examination:
        """Whether the remat setting does anything to this loss, from a dry trace that is made once.

        Raises:
          UnmatchedNamesError: no block of the loss offers a name of the policy; RematWithoutEffect: the
            loss marks no block.
        """
        if self._examination is None:
            with self._layout.entered():
                self._examination = examine_step(self)
        return self._examination

    def put(self, batch: Any, *, uneven: bool = False) -> Any:
        """A batch where the step takes it: on its mesh, or as it is; `uneven` rows whole."""
        layout = self._layout
        return batch if layout.mesh is None else jax.device_put(batch, layout.batch(batch, uneven=uneven))

    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of the state that `init` makes."""
        # The key is abstract too: on the devices of a target nothing can be made.
        rng = jax.eval_shape(lambda: self._rng)
        return jax.eval_shape(self._init, jax.tree.map(unsharded, self._given()), rng)

    def abstract_batch(self) -> Any:
        """Shapes and dtypes of the example batch."""
        return jax.eval_shape(lambda batch: batch, jax.tree.map(unsharded, self.workload.batch))

    def abstract_arguments(self) -> tuple[TrainState, Any]:
        """`abstract_state` and `abstract_batch` with the shardings of what the workload was given."""
        state, given = self.abstract_state(), self._given()
        params, rest = (
            tree if own is None else jax.tree.map(_with_sharding_of, tree, own)
            for tree, own in zip((state.params, state.state), given, strict=True)
        )
        state = dataclasses.replace(state, params=params, state=rest)
        batch = jax.tree.map(_with_sharding_of, self.abstract_batch(), self.workload.batch)
        if self._layout.mesh is None:
            return state, batch
        state = jax.tree.map(_with_sharding, state, self._layout.state(state))
        return state, jax.tree.map(_with_sharding, batch, self._layout.batch(batch))

    def entered(self):
        """The step's mesh, for tracing what is part of it."""
        return self._layout.entered()

    @property
    def idle_settings(self) -> tuple[str, ...]:
        """One sentence for each setting that does nothing for this workload."""
        return idle_settings(self, Reduction(kind="each", rows=self._layout.rows).shards)

    @property
    def mesh_here(self) -> Any:
        """`mesh` for a step like this one that this machine can run: devices that are not here become one that is."""
        around = self._layout.around
        return self.mesh if around is None or self._layout.is_here else one_device(around)

    # -- tracing ---------------------------------------------------------------------------------

    @property
    def _rng(self):
        return jax.random.key(0) if self.workload.rng is None else self.workload.rng

    @property
    def _optimizer(self):
        dtype = self.config.dtypes.optimizer
        own = guarded(self.workload.optimizer)
        return own if dtype is None else precision.store_state_in(own, dtype)

    def _given(self):
        """The workload's parameters and state, None where a key creates them."""
        return [None if is_creator(tree) else tree for tree in (self.workload.params, self.workload.state)]

    def _init(self, given, rng) -> TrainState:
        key = jax.random.fold_in(rng, jnp.uint32(2**32 - 1))  # no window has this index
        params, state = (
            create(key) if is_creator(create) else jax.tree.map(jnp.copy, tree)
            for create, tree in zip((self.workload.params, self.workload.state), given, strict=True)
        )
        if self.config.dtypes.params is not None:
            params = precision.cast_floating(params, self.config.dtypes.params)
        trainable, _ = partition(params, self.workload.trainable)
        scaling = self.config.dtypes.loss_scale
        return TrainState(
            step=jnp.zeros((), jnp.int32),
            window=jnp.zeros((), jnp.int32),
            skipped=jnp.zeros((), jnp.int32),
            last_finite=jnp.ones((), jnp.bool_),
            params=params,
            opt_state=self._optimizer.init(trainable),
            state=state,
            loss_scale=None if scaling is None else precision.start_loss_scale(scaling),
            rng=rng,
        )

    def _step(self, state: TrainState, batch):
        check_state(self, state)
        trainable, frozen = partition(state.params, self.workload.trainable)
        check_precision(self.workload, self.config, state, batch)
        self._check_remat()
        scale = current_scale(state, self.config)
        out = accumulate.value_and_grad(
            self.loss(frozen),
            self.config.accumulation_steps,
            accumulator_dtype=self.config.dtypes.accumulator,
            batch_axes=self.workload.batch_axes,
            state_reduction=state_reductions(self.workload, state.state),
            data_sharding=self.reduction().rows if self.reduction().kind == "once" else None,
        )(trainable, batch, rng=jax.random.fold_in(state.rng, state.window), state=state.state, loss_scale=scale)
        self.added = out.added
        # Optimizers that adapt to the loss (optax.contrib.reduce_on_plateau, …) take it as `value`; others ignore it.
        with jax.named_scope(OPTIMIZER_SCOPE):
            updates, opt_state = self._optimizer.update(out.grads, state.opt_state, trainable, value=out.value)
            trained = optax.apply_updates(trainable, updates)
        new = TrainState(
            step=state.step + 1,
            window=state.window + 1,
            skipped=state.skipped,
            last_finite=jnp.isfinite(out.value),
            params=merge(trained, frozen),
            opt_state=opt_state,
            state=out.state,
            loss_scale=None,
            rng=state.rng,
        )
        if scale is not None:
            with jax.named_scope(OPTIMIZER_SCOPE):
                new = skip_unless(out.finite, new, state, self.config)
        if self._layout.mesh is not None:
            new = self._layout.constrain(new, self._layout.state(self.abstract_arguments()[0]))
        check_metric_names(out.metrics, self.config)
        metrics = {"loss": out.value, **out.metrics}
        if self.config.dtypes.output is not None:
            metrics = precision.cast_floating(metrics, self.config.dtypes.output)
        return new, {**metrics, **scaling_metrics(new, scale)}

    def reduction(self) -> Reduction:
        """Whether every shard of the batch accumulates its own gradients; found out once.

        Raises:
          ConfigError: it was asked for, and cannot be.
        """
        if self._reduction is None:
            with self._layout.entered():
                self._reduction = choose_reduction(self, self.abstract_arguments()[0].params, self._layout.rows)
        return self._reduction

    def loss(self, frozen=None, *, checkpoint=remat.checkpoint_unchecked):
        """`configured_loss` of this step's workload and config."""
        return configured_loss(self.workload, self.config, frozen, checkpoint=checkpoint, decision=self.decision)

    def _with_remat(self, remat: str | Policy | None) -> "TrainStep":
        """This step under another setting."""
        if remat is None or remat == self.config.remat:
            return self
        return self.configured(remat=remat)

    def _check_remat(self) -> None:
        """Names that match nothing raise; a setting that saves nothing warns. Once a trace, not once a step."""
        if self.config.policy.keeps_everything:
            return
        for message in self.examine().warnings:
            warnings.warn(message, RematWarning, stacklevel=2)


def _with_sharding_of(shape: jax.ShapeDtypeStruct, leaf: Any) -> jax.ShapeDtypeStruct:
    """`shape` sharded as `leaf` is over a mesh; an array on one device says nothing."""
    sharding = sharding_of(leaf)
    return shape if sharding is None else _with_sharding(shape, sharding)


def _with_sharding(shape: jax.ShapeDtypeStruct, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding, weak_type=shape.weak_type)
