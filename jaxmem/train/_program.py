"""A step as a program: jitted for this machine, traced, lowered and compiled for a target."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax

from jaxmem.analysis import check_compiled
from jaxmem.targets import Target, compile_lowered, on_target, place, refusing_options, resolve_target
from jaxmem.train import _scan_stacks
from jaxmem.train._mistakes import blaming
from jaxmem.train._peaks import versions
from jaxmem.train._settle import settled
from jaxmem.train._spec import StepSpec, like_given, once
from jaxmem.train._state import TrainState
from jaxmem.train._update import abstract_arguments, abstract_state, make_update, new_state


@once
def jitted(spec: StepSpec) -> Callable:
    """`step(state, batch) -> (state, metrics)` for this machine, with `state` donated."""
    here = resolve_target(None)  # it runs here, whatever it is compiled for
    return _jitted_in_form(settled(spec, here), here.platform)


def _jitted_in_form(spec: StepSpec, platform: str) -> Callable:
    """One function for a spec, settled here or before, so that it is compiled once."""
    key = (_jitted_in_form, platform)
    if key not in spec.known:
        options = spec.compiler_options(platform)
        spec.known[key] = jax.jit(make_update(spec), donate_argnums=0, compiler_options=options)
    return spec.known[key]


def run(spec: StepSpec, state: TrainState, batch: Any) -> Any:
    """The step, run on this machine; the first call compiles it."""
    step = jitted(spec)
    if run not in spec.known:
        here = jax.default_backend()
        spec.known[run] = _shared(step.trace(state, batch), here) if here == "gpu" else frozenset()
    with _scan_stacks.apart(spec.known[run]):
        return step(state, batch)


def _lowered(traced: jax.stages.Traced, platform: str) -> jax.stages.Lowered:
    """A step lowered; every one is lowered here or by `run`, which JAX compiles once for both."""
    with _scan_stacks.apart(_shared(traced, platform)):
        return traced.lower()


def _shared(traced: jax.stages.Traced, platform: str) -> frozenset:
    return _scan_stacks.shared(traced.jaxpr.jaxpr, platform)


@once
def _jitted_elsewhere(spec: StepSpec) -> Callable:
    """The same for other machines, of a spec settled for one, without this machine's options."""
    return jax.jit(make_update(spec), donate_argnums=0)


def jitted_init(spec: StepSpec, places: Any) -> Any:
    """`init(given, rng) -> state`: inside jit, so that what a key creates is allocated once, where it belongs.

    Args:
      places: shardings of the state; None leaves them to JAX.
    """
    return jax.jit(lambda given, rng: new_state(spec, given, rng), out_shardings=places)


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TargetProgram:
    """The step of a spec, traced for a target.

    Args:
      arguments: shapes of `(state, batch)` where the step has them; `traced` has them on the target.
      traced: of these.
      target: with the mesh of the arguments' shardings.
      notes: sentences on how it was placed and traced.
    """

    arguments: tuple[TrainState, Any]
    traced: jax.stages.Traced
    target: Target
    notes: tuple[str, ...]

    def lower(self) -> jax.stages.Lowered:
        """Lowered with the target's platform as default."""
        with on_target(self.target):
            return _lowered(self.traced, self.target.platform)

    @property
    def added(self) -> Any:
        """How gradients of micro-batches are added up; None of one that has none."""
        return self.traced.out_info.added


def trace_here(spec: StepSpec) -> jax.stages.Traced:
    """The step traced on abstract arguments, for the default backend."""
    if spec.layout.mesh is None:  # arguments are taken as they come
        with blaming(spec):
            return jitted(spec).trace(abstract_state(spec), spec.abstract_batch())
    with blaming(spec), spec.entered():
        return jitted(spec).trace(*abstract_arguments(spec))


def trace_for(spec: StepSpec, target: Target) -> TargetProgram:
    """The step traced for a target; for this machine, as it runs."""
    here = not target.deviceless and target.platform == jax.default_backend()
    function = jitted(spec) if here else _jitted_elsewhere(settled(spec, target))
    arguments = abstract_arguments(spec)
    placed = place(arguments, target)
    with on_target(placed.target) as scope, blaming(spec), spec.entered():
        traced = function.trace(*placed.args)
    notes = (*placed.notes, *scope.notes)
    return TargetProgram(arguments=arguments, traced=traced, target=placed.target, notes=notes)


def lower_init(spec: StepSpec, target: Target) -> jax.stages.Lowered:
    """What makes the first state, lowered for a target."""
    given, rng = spec.abstract_given()
    arguments = abstract_arguments(spec)[0], [like_given(*pair) for pair in zip(given, spec.given(), strict=True)], rng
    placed = place(arguments, target)
    state, given, rng = placed.args
    places = None if spec.layout.around is None else jax.tree.map(lambda leaf: leaf.sharding, state)
    with on_target(placed.target), blaming(spec), spec.entered():
        return jitted_init(spec, places).trace(given, rng).lower()


def lower(spec: StepSpec, target: str | Target | None) -> jax.stages.Lowered:
    """The step lowered for a target; None is the default backend."""
    if target is None:
        return _lowered(trace_here(spec), jax.default_backend())
    return trace_for(spec, resolve_target(target)).lower()


def compile_step(spec: StepSpec, target: str | Target | None) -> jax.stages.Compiled:
    """The step compiled for a target; None is this machine.

    Raises:
      MiscompiledError: the compiler made it compute wrong numbers, in a way that is known.
    """
    resolved = resolve_target(target)
    compiled = compile_lowered(lower(spec, target), resolved, spec.compiler_options(resolved.platform))
    check_compiled(compiled, resolved.platform, "step")
    return compiled


def compile_here(spec: StepSpec, state: TrainState, batch: Any) -> jax.stages.Compiled:
    """The program that a call with `state` and `batch` runs; JAX compiles it once for both."""
    with blaming(spec, state, batch), refusing_options(spec.workload.compiler_options):
        placed = spec.put(batch)
        with spec.entered(state, placed):
            return _lowered(jitted(spec).trace(state, placed), jax.default_backend()).compile()


def content(spec: StepSpec, lowered: jax.stages.Lowered, target: Target) -> str:
    """What a compiled peak depends on, as one word."""
    devices = [(device.platform, device.device_kind) for device in target.devices]
    options = sorted({**dict(target.compiler_options), **dict(spec.compiler_options(target.platform) or {})}.items())
    said = (lowered.as_text(), target.name, target.topology, options, devices, versions())
    return hashlib.sha256(repr(said).encode()).hexdigest()
