"""The shape of a lever: what one way to change bytes and seconds does to a step, and what it says of it.

A lever is one file that ends in its `LEVER`; `LEVERS` in `_update.py` lists them.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jaxmem.analysis import PhaseNeed
from jaxmem.errors import MetricError
from jaxmem.targets import Target
from jaxmem.train._spec import StepSpec
from jaxmem.train._state import TrainState

# (state, batch, **options of `accumulate.value_and_grad` and its call) -> (new state, `Gradients`, metrics)
Update = Callable[..., tuple[TrainState, Any, dict[str, Any]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Told:
    """What a lever says in a report.

    Args:
      notes: sentences for the report's warnings.
      news: sentences on what was done, and is as it should be.
      fields: of `analysis.Program`, by name.
      phases: what other phases of a run, that only the lever brings, need beside the state.
    """

    notes: tuple[str, ...] = ()
    news: tuple[str, ...] = ()
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    phases: tuple[PhaseNeed, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lever:
    """One lever, as functions of a step's spec; each may be left out.

    Args:
      form: `(spec, target) -> fields of Settled`, what the lever's setting "auto" means on a target; traces nothing
        that is not needed.
      rivals: `(spec, target) -> fields of Settled`, for each other setting that may win where "auto" was asked for and
        compiles are at hand.
      idle: one sentence for each of the lever's settings that does nothing for the workload; traces nothing.
      state: `(spec, state) -> state`, with the fields that the lever needs.
      shardings: `(spec, shardings) -> shardings`, where the state's leaves lie on the mesh of the step.
      around: `(spec, update) -> update`, with what the lever puts round the update.
      told: `(spec, target) -> Told`, called while tracing means the target.
    """

    form: Callable[[StepSpec, Target], Mapping[str, Any]] = lambda spec, target: {}
    rivals: Callable[[StepSpec, Target], Iterable[Mapping[str, Any]]] = lambda spec, target: ()
    idle: Callable[[StepSpec], Iterable[str]] = lambda spec: ()
    state: Callable[[StepSpec, TrainState], TrainState] = lambda spec, state: state
    shardings: Callable[[StepSpec, TrainState], TrainState] = lambda spec, shardings: shardings
    around: Callable[[StepSpec, Update], Update] = lambda spec, update: update
    told: Callable[[StepSpec, Target], Told] = lambda spec, target: Told()


def with_own_metrics(metrics: dict[str, Any], **own: Any) -> dict[str, Any]:
    """Metrics of the loss with the step's own; MetricError where they have a name in common."""
    for name in own:
        if name in metrics:
            raise MetricError(
                wanted=f"metrics named otherwise than {' and '.join(map(repr, own))}, which are the step's own",
                got=f"a metric named {name!r}",
                do="Rename it.",
            )
    return {**own, **metrics}
