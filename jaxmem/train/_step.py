"""`make_train_step`: a workload and a config become one jitted, donated optimizer step."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import remat
from jaxmem._blame import warn
from jaxmem._cell import shortening
from jaxmem._shown import brief, differing, name_of, one_line
from jaxmem.analysis import MemoryReport
from jaxmem.budget import parse_budget
from jaxmem.config import MemoryConfig
from jaxmem.errors import ConfigError, SettingWarning, WorkloadError
from jaxmem.policy import Policy
from jaxmem.remat.auto import MAX_COMPILES
from jaxmem.targets import Target, refusing_options, resolve_target
from jaxmem.train import _program as programs
from jaxmem.train._budget import Trials, spend, spend_bytes
from jaxmem.train._decision import decided_by_one, put_back, step_problem
from jaxmem.train._hosts import check_same_values
from jaxmem.train._mistakes import blaming
from jaxmem.train._reduction import Reduction, reduction
from jaxmem.train._remat import examine, residual_table, solution
from jaxmem.train._report import report
from jaxmem.train._settle import settled
from jaxmem.train._spec import StepSpec
from jaxmem.train._state import TrainState
from jaxmem.train._update import abstract_arguments, abstract_state, idle_settings
from jaxmem.workload import Workload, check_key, path_string


@shortening()
def make_train_step(
    workload: Workload,
    config_or_plan: MemoryConfig | None = None,
    *,
    mesh: Any = None,
    target: str | Target | None = None,
    decision: str | None = None,
) -> "TrainStep":
    """One optimizer step of a workload: micro-batches, remat and precision as the config says.

    Args:
      workload: what is trained.
      config_or_plan: how, a `MemoryConfig`; the default is the plain step.
      mesh: a `jax.sharding.Mesh`, on which `step.init` puts the state, and which is set while the loss is traced. The
        rows of every batch are sharded like those of the workload's example batch; where that is not sharded, over the
        mesh's axis "data", or its first. Parameters lie as the workload's own arrays do, else whole on every device.
        If not given, the mesh of the workload's arrays, where they are sharded over one.
      target: name of the chip that `step.lower()`, `.compile()` and `.report()` are for, such as "tpu-v5e:1x1"; None
        for the machine's own. Running the step always means this machine.
      decision: what a remat budget was spent on before, `step.decision.to_json()`: it is put back exactly, and
        nothing is solved or compiled.

    Under a budget (`remat="auto:6GiB"`) the step is compiled for its target a few times before this returns.

    Settings that do nothing for the workload are said by a SettingWarning.

    Raises:
      BudgetInfeasible: no choice of residuals keeps the peak within the budget.
      ConfigError: for what this version does not act on. When the step is traced, RematWithoutEffect: a remat
        setting for a loss that declares no `memory` and has nothing that repeats.
      DecisionError: the decision was made for other blocks; names what differs.
      MeshError: the workload's arrays lie on several meshes, or are sharded over axes that `mesh` lacks.

    >>> import jax.numpy as jnp, optax
    >>> from jaxmem import MemoryConfig, Workload, make_train_step
    >>> workload = Workload(lambda w, x: jnp.mean((x * w) ** 2), jnp.ones(()), jnp.ones(8), optax.sgd(0.1))
    >>> step = make_train_step(workload, MemoryConfig(accumulation_steps=2))
    >>> state, metrics = step(step.init(), workload.batch)
    >>> float(metrics["loss"]), round(float(state.params), 6)
    (1.0, 0.8)
    """
    spec = StepSpec.of(workload, config_or_plan, mesh)
    if target is not None:
        resolve_target(target)  # an unknown name is said here, and not when the step is first compiled for it
    decided = spend(spec, target) if decision is None else put_back(spec, target, decision)
    step = TrainStep(decided, target)
    for message in idle_settings(spec):
        warn(message, SettingWarning)
    return step


class TrainStep:
    """`step(state, batch) -> (state, metrics)`, jitted, with `state` donated; made by `make_train_step`.

    Args:
      spec: what the step is made from, its budget spent.
      target: what it is lowered, compiled and reported for; None for this machine.
      trials: what its budgets have compiled so far, by target.
    """

    def __init__(self, spec: StepSpec, target: str | Target | None = None, trials: dict[Target, Trials] | None = None):
        self.spec, self.target = spec, target
        self.workload, self.config, self.mesh, self.decision = spec.workload, spec.config, spec.mesh, spec.decision
        self._trials = {} if trials is None else trials

    def __repr__(self) -> str:
        on = "this machine" if self.target is None else getattr(self.target, "name", self.target)
        config = [(field, brief(value)) for field, value in differing(self.config)]
        return one_line("TrainStep", [("loss", name_of(self.workload.loss_fn)), ("target", str(on)), *config])

    # -- running -----------------------------------------------------------------------------------

    @shortening()
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
        spec = self.spec
        rng = spec.rng if rng is None else rng
        check_key(rng)
        check_same_values({"params": spec.given()[0], "state": spec.given()[1], "rng": rng}, "")
        on_mesh = spec.layout.mesh is not None
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract_arguments(spec)[0]) if on_mesh else None
        with blaming(spec), spec.entered(rng):
            return programs.jitted_init(spec, places)(spec.given(), rng)

    @shortening()
    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step on a batch; `state` is donated. Metrics hold "loss" and the loss's own.

        With a loss scale also "loss_scale", that of this window, and "skipped", windows skipped so far: one whose loss
        or gradients are not finite changes neither parameters nor optimizer state nor model state.
        """
        spec = self.spec
        with blaming(spec, state, batch), refusing_options(spec.workload.compiler_options):
            placed = spec.put(batch)
            with spec.entered(state, placed):
                return tuple(programs.run(spec, state, placed))

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

    # -- its program -------------------------------------------------------------------------------

    def trace(self) -> jax.stages.Traced:
        """The step traced on an abstract state and the workload's example batch."""
        return programs.trace_here(self.spec)

    def lower(self) -> jax.stages.Lowered:
        """The traced step lowered for the step's target: the default backend, unless it was given one."""
        return programs.lower(self.spec, self.target)

    def compile(self) -> jax.stages.Compiled:
        """The step compiled for its target: this machine, unless it was given one.

        Raises:
          MiscompiledError: the compiler made it compute wrong numbers, in a way that is known.
        """
        return programs.compile_step(self.spec, self.target)

    @shortening()
    def report(self) -> MemoryReport:
        """What the compiled step needs, on the step's target."""
        return report(self.spec, self.target)

    def abstract_state(self) -> TrainState:
        """Shapes and dtypes of the state that `init` makes."""
        return abstract_state(self.spec)

    def abstract_batch(self) -> Any:
        """Shapes and dtypes of the example batch."""
        return self.spec.abstract_batch()

    def abstract_arguments(self) -> tuple[TrainState, Any]:
        """`abstract_state` and `abstract_batch` with the shardings of what the workload was given."""
        return abstract_arguments(self.spec)

    def reduction(self) -> Reduction:
        """Whether every shard of the batch accumulates its own gradients; found out once.

        Raises:
          ConfigError: it was asked for, and cannot be.
        """
        return reduction(self.spec)

    # -- its residuals -----------------------------------------------------------------------------

    def examine(self) -> remat.Examination:
        """Whether the remat setting does anything to this loss, from a dry trace that is made once.

        Raises:
          UnmatchedNamesError: no block of the loss offers a name of the policy; RematWithoutEffect: the
            loss marks no block.
        """
        return examine(self._settled())

    def residuals(self, *, remat: str | Policy | None = None) -> remat.ResidualTable:
        """What the forward pass of one micro-batch keeps for its backward pass, value by value; modelled.

        Args:
          remat: setting to assume instead of the config's.

        Returns:
          The table; `before` holds the one of the plain loss, where there is a remat setting.
        """
        return residual_table(self._with_remat(remat))

    def residual_bytes(self, *, remat: str | Policy | None = None) -> int:
        """Bytes on the device that the forward pass of one micro-batch keeps for its backward pass; modelled.

        Args:
          remat: setting to assume instead of the config's.
        """
        return examine(self._with_remat(remat)).residuals.device_bytes

    def _with_remat(self, setting: str | Policy | None) -> StepSpec:
        same = setting is None or setting == self.config.remat
        return self._settled() if same else settled(spend(self.spec.with_remat(setting), self.target), self._target())

    def _settled(self) -> StepSpec:
        """The spec in the form that it has on the step's target."""
        return settled(self.spec, self._target())

    def _target(self) -> Target:
        return resolve_target(self.target)

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
        return solution(self.spec)

    def with_decision(self, text: str) -> "TrainStep":
        """The step with what a remat budget was spent on before, put back exactly; nothing is solved or compiled.

        Args:
          text: `step.decision.to_json()` of a step of this model, batch and config.

        Raises:
          DecisionError: it was made for other blocks; names what differs.
        """
        return TrainStep(put_back(dataclasses.replace(self.spec, decision=None), self.target, text), self.target)

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
        resolved = resolve_target(target)
        spec = settled(self.spec.with_remat(f"auto:{size}B"), resolved)
        limits = {"offload": offload, "max_compiles": max_compiles}

        def solved() -> StepSpec:
            if resolved not in self._trials:
                self._trials[resolved] = Trials(step_problem(spec, resolved))
            return spend_bytes(spec, size, resolved, self._trials[resolved], **limits)

        return TrainStep(decided_by_one(spec, resolved, solved), target, self._trials)
