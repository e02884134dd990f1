"""`verify`: does a configured step compute the plain step's gradients, and keep what its levers promise?"""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import jax

from jaxmem._cell import shortening
from jaxmem._shown import one_line
from jaxmem.analysis import MemoryReport
from jaxmem.config import MemoryConfig
from jaxmem.errors import MiscompiledError, RematWarning, RematWithoutEffect, WorkloadError
from jaxmem.targets import Target, resolve_target
from jaxmem.train import _promises as promises
from jaxmem.train._gradients import Outcome, PlainLoss, TooLarge, available_bytes, fill_batch, run_step
from jaxmem.train._leaves import worst_leaf
from jaxmem.train._one_by_one import run_one_by_one
from jaxmem.train._report import report
from jaxmem.train._spec import StepSpec
from jaxmem.train._state import TrainState
from jaxmem.train._step import TrainStep
from jaxmem.train._verification import Check, Verification


@shortening()
def verify(
    step: TrainStep,
    reference: TrainStep | None = None,
    *,
    state: TrainState | None = None,
    batch: Any = None,
    rng: Any = None,
    target: str | Target | None = None,
    name: str = "step",
) -> Verification:
    """A configured step against its plain reference: gradients, loss, model state, and what its levers promise.

    Gradients are computed on this machine, bytes by the target's compiler: of a target that is not here nothing was
    run, so that the verdict is "uncertain" at best. Without `reference`, gradients are
    compared with those of the plain float32 step on the whole batch; where that is another computation than
    micro-batches (a loss with model state or random numbers), with plain micro-batches, one by one. Residuals,
    temporaries and recomputation are compared with the same config without remat.

    Args:
      step: what is verified.
      reference: a step to compare with in all of this.
      state: parameters, model state and key to start from; made from `rng` if not given.
      batch: one batch of arrays; the workload's own if not given. Shapes are filled with random numbers.
      rng: PRNG key; the workload's own if not given.
      target: what to compile for; the step's own if not given.
      name: for the result.

    Raises:
      WorkloadError: parameters that are only shapes, or a batch that cannot be filled.

    >>> import jax.numpy as jnp, optax
    >>> from jaxmem import MemoryConfig, Workload, make_train_step
    >>> def loss(w, x, *, memory):  # a mean over the rows of each micro-batch, and micro-batches are equally large
    ...     return jnp.mean(memory.block(lambda w, x: jnp.sin(jnp.sin(x @ w)))(w, x) ** 2)
    >>> workload = Workload(loss, jnp.eye(4), jnp.ones((8, 4)), optax.sgd(0.1))
    >>> found = verify(make_train_step(workload, MemoryConfig(accumulation_steps=2, remat="full")), target="cpu")
    >>> found["gradients"].verdict, found["residuals"].verdict, found.passed
    ('pass', 'pass', True)
    """
    for value in (step, reference):
        if value is not None and not isinstance(value, TrainStep):
            raise WorkloadError(
                wanted="a step made by make_train_step", got=f"a {type(value).__name__}", do="Pass the step itself."
            )
    return Verifier(state=state, batch=batch, rng=rng, target=step.target if target is None else target).check(
        step, reference, name=name
    )


class NotCompared(Exception):
    """Why gradients could not be computed here, and what is known all the same."""

    def __init__(self, why: str, dtype: str, notes: tuple[str, ...]):
        super().__init__(why)
        self.dtype, self.notes = dtype, notes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcomes:
    """What a step computed, and what it should have.

    Args:
      got: by the step.
      expected: by the reference.
      reference: in words, what that is.
      dtype: the narrowest that is at work.
      notes: sentences on how it was done.
    """

    got: Outcome
    expected: Outcome
    reference: str
    dtype: str
    notes: tuple[str, ...] = ()

    @property
    def tolerance(self) -> float:
        """Relative L2 distance that rounding may make in the worst leaf."""
        return promises.TOLERANCES[self.dtype]


class Verifier:
    """Verifies several steps of one workload, and computes what they share once.

    Args:
      state, batch, rng, target: as in `verify`.
      limit_bytes: memory that running a step may take; what is free on this machine if not given.
      progress: called with what is done next.
    """

    def __init__(
        self,
        *,
        state: TrainState | None = None,
        batch: Any = None,
        rng: Any = None,
        target: str | Target | None = None,
        limit_bytes: int | None = None,
        progress: Callable[[str], None] | None = None,
    ):
        self.state, self.batch, self.rng = state, batch, rng
        self.progress = progress or (lambda stage: None)
        self.target = resolve_target(target)
        self.limit_bytes = available_bytes() if limit_bytes is None else limit_bytes
        self._references: dict[Any, tuple[Outcome, str] | TooLarge] = {}
        self._reports: dict[Any, MemoryReport] = {}
        self._plain: dict[int, PlainLoss] = {}

    def __repr__(self) -> str:
        return one_line("Verifier", [("target", self.target.name), ("references", str(len(self._references)))])

    def check(
        self,
        step: TrainStep,
        reference: TrainStep | None = None,
        *,
        name: str = "step",
    ) -> Verification:
        """As `verify`."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RematWarning)  # its facts are what is verified
            fields, checks, notes = self._gradients(step, reference)
            if reference is not None or step.config.recomputes:
                plain = reference or TrainStep(step.spec.without_remat(), step.target)
                found, promised = self._bytes(step, plain, name)
                fields, checks = {**fields, **found}, [*checks, *promised]
        return Verification(
            name=name, target=self.target.name, checks=tuple(checks), notes=tuple(dict.fromkeys(notes)), **fields
        )

    def remember(self, step: TrainStep, report: MemoryReport) -> None:
        """Spares compiling `step` on the target: this is its report."""
        self._reports[id(step.workload), step.config, id(step.decision)] = report

    # -- gradients -------------------------------------------------------------------------------

    def outcomes(self, step: TrainStep, reference: TrainStep | None = None) -> "Outcomes":
        """What the step and its reference computed on one batch, on this machine.

        Raises:
          NotCompared: this machine cannot run them, or the config's remat has no effect on this loss.
        """
        workload = step.workload
        rng = step.spec.rng if self.rng is None else self.rng
        batch, made = fill_batch(workload.batch if self.batch is None else self.batch, rng)
        spec = step.spec
        batch = spec.put(batch) if spec.mesh_here is spec.mesh else batch
        notes = ("The batch is only a shape: its integers are random zeros and ones.",) if made else ()
        dtype = promises.narrowest(step.config, self._plain_loss(step, batch).narrow)
        local = step.reduction().kind == "once" and step.reduction().shards > 1
        if local and reference is None and not self._plain_loss(step, batch).separable:
            raise NotCompared(
                "shards that accumulate locally draw numbers and see states of their own, which no plain step does.",
                dtype,
                notes,
            )
        try:
            self.progress("computing gradients")
            got = run_step(step, batch, self.state, rng, self.limit_bytes)
            expected, words = self._reference(step, reference, batch, rng)
        except TooLarge as error:
            raise NotCompared(f"{error}.", dtype, notes) from None
        except RematWithoutEffect as error:
            raise NotCompared(str(error), dtype, notes) from None
        return Outcomes(got=got, expected=expected, reference=words, dtype=dtype, notes=notes)

    def _gradients(self, step: TrainStep, reference: TrainStep | None) -> tuple[dict, list[Check], tuple[str, ...]]:
        try:
            found = self.outcomes(step, reference)
        except NotCompared as error:
            fields = {"gradient_tolerance": promises.TOLERANCES[error.dtype], "tolerance_dtype": error.dtype}
            check = Check(name="gradients", verdict="uncertain", detail=f"Not compared: {error}")
            return {**fields, "reference": "the plain step"}, [check], error.notes
        got, expected, tolerance, dtype = found.got, found.expected, found.tolerance, found.dtype
        ran_on = jax.default_backend()
        fields = {"gradient_tolerance": tolerance, "tolerance_dtype": dtype, "reference": found.reference}
        fields["compared_on"] = ran_on
        error, path = worst_leaf(got.gradients, expected.gradients)
        state_error, state_path = worst_leaf(got.state, expected.state)
        loss_error = abs(got.loss - expected.loss) / max(abs(expected.loss), 1e-12)
        fields |= {"gradient_error": error, "gradient_path": path, "loss": got.loss, "reference_loss": expected.loss}
        limit = f"{tolerance:.0e} allowed for {dtype}"
        checks = [
            promises.within(
                "gradients", error, tolerance, f"Relative distance {error:.1e} in the worst leaf, {path}; {limit}."
            ),
            promises.within("loss", loss_error, tolerance, f"{got.loss:.6g} against {expected.loss:.6g}; {limit}."),
        ]
        if jax.tree.leaves(got.state):
            fields["state_error"] = state_error
            detail = f"Relative distance {state_error:.1e} in the worst leaf, {state_path}; {limit}."
            checks.append(promises.within("state", state_error, tolerance, detail))
        unrun = promises.backend(self.target, ran_on)
        checks += [unrun] if unrun else []
        return fields, checks, found.notes

    def _plain_loss(self, step: TrainStep, batch) -> PlainLoss:
        if id(step.workload) not in self._plain:
            self._plain[id(step.workload)] = PlainLoss.of(step, batch)
        return self._plain[id(step.workload)]

    def _reference(self, step: TrainStep, reference: TrainStep | None, batch, rng) -> tuple[Outcome, str]:
        """What is compared with, and that in words; TooLarge again where it was once."""
        steps = step.config.accumulation_steps
        key = (id(reference or step.workload), step.mesh, 0 if reference else steps, step.config.generator)
        if key not in self._references:
            self.progress("computing reference gradients")
            try:
                self._references[key] = self._run_reference(step, reference, batch, rng)
            except TooLarge as error:
                self._references[key] = error
        found = self._references[key]
        if isinstance(found, TooLarge):
            raise found
        return found

    def _run_reference(self, step: TrainStep, reference: TrainStep | None, batch, rng) -> tuple[Outcome, str]:
        if reference is not None:
            return run_step(reference, batch, self.state, rng, self.limit_bytes), "the reference step"
        steps = step.config.accumulation_steps
        if steps == 1 or self._plain_loss(step, batch).separable:
            config = MemoryConfig(generator=step.config.generator)  # another generator draws other numbers
            plain = TrainStep(StepSpec.of(step.workload, config, step.spec.mesh_here))
            return run_step(plain, batch, self.state, rng, self.limit_bytes), "the plain step on the whole batch"
        outcome = run_one_by_one(step, batch, self.state, rng, self.limit_bytes)
        words = "plain micro-batches one by one, as model state or random numbers make the whole batch another matter"
        return outcome, words

    # -- bytes and FLOPs -------------------------------------------------------------------------

    def _bytes(self, step: TrainStep, plain: TrainStep, name: str) -> tuple[dict, list[Check]]:
        try:
            self.progress(f"compiling {name}")
            after = self._report(step)
        except RematWithoutEffect as error:
            return {}, [Check(name="residuals", verdict="fail", detail=str(error))]
        except MiscompiledError as error:
            return {}, [Check(name="compiler", verdict="fail", detail=str(error))]
        self.progress(f"compiling the reference of {name}")
        before = self._report(plain)
        fields = {
            "residual_bytes": after.saved_residual_bytes,
            "reference_residual_bytes": before.saved_residual_bytes,
            "temp_bytes": after.temp_bytes,
            "reference_temp_bytes": before.temp_bytes,
            "host_temp_bytes": after.host_temp_bytes,
            "reference_host_temp_bytes": before.host_temp_bytes,
            "asked_recompute_flops": after.asked_recompute_flops,
            "recompute_flops": after.recompute_flops,
        }
        checks = []
        if step.config.recomputes:
            checks = [promises.residuals(before, after), promises.temps(before, after), promises.recompute(after)]
        if step.config.policy.offload:
            checks.append(promises.host(before, after))
        return fields, checks

    def _report(self, step: TrainStep) -> MemoryReport:
        key = (id(step.workload), step.config, id(step.decision))
        if key not in self._reports:
            self._reports[key] = report(step.spec, self.target)
        return self._reports[key]
