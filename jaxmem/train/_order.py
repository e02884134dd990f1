"""The order of the backward pass as a lever: whether weight gradients are made before it goes on."""

from collections.abc import Iterator
from typing import NamedTuple

from jaxmem._blame import warn
from jaxmem._jaxpr_costs import calls_of
from jaxmem.errors import SettingWarning
from jaxmem.jaxprs import TIE
from jaxmem.remat.blocks import HEAD
from jaxmem.targets import Target
from jaxmem.train._lever import Lever, Told, Update
from jaxmem.train._spec import StepSpec, loss_program, once

# Platforms on which "auto" ties the head of a step that recomputes.
_TIED_ON = frozenset({"gpu", "tpu"})

_IDLE = (
    'order="tied" does nothing: the loss has neither layers outside of a scan, found or marked with memory.block(...), '
    "nor a matmul after the last layer. Leave it out."
)


class Ties(NamedTuple):
    """Ties in the loss of one micro-batch.

    Args:
      blocks: how many runs of blocks have one.
      head: whether what comes after the last has one.
    """

    blocks: int = 0
    head: bool = False

    def __str__(self) -> str:
        blocks = f"{self.blocks} block{'' if self.blocks == 1 else 's'}" if self.blocks else ""
        return " and ".join(filter(None, [blocks, "the head" if self.head else ""]))


@once
def ties(spec: StepSpec) -> Ties:
    """The ties in the loss of a spec in a form; traces it."""
    found = list(_names(loss_program(spec).jaxpr, 1))
    return Ties(sum(times for name, times in found if name != HEAD), any(name == HEAD for name, _ in found))


def _names(jaxpr, times: int) -> Iterator[tuple[str, int]]:
    """(name, how often it runs) of each tie in a program."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == TIE:
            yield eqn.params["at"], times
        if (calls := calls_of(eqn)) is not None:
            for inner in calls.programs:
                yield from _names(inner, times * calls.times)


def _default(spec: StepSpec, target: Target) -> str:
    """What "auto" means for a step on a target: a tie at the head where that was never seen to be worse.

    Ties pay where values are recomputed: the gradient of a head's weights, and the logits that it needs, wait while
    layers run again. With several devices a tie would hold back the sum of gradients over them; nobody measured that.
    """
    around = spec.layout.around
    alone = target.device_count == 1 and (around is None or around.size == 1)
    return "head" if alone and target.platform in _TIED_ON and spec.config.recomputes else "free"


def _form(spec: StepSpec, target: Target) -> dict[str, str]:
    return {"order": _default(spec, target) if spec.config.order == "auto" else spec.config.order}


def _rivals(spec: StepSpec, target: Target) -> Iterator[dict[str, str]]:
    if spec.config.order == "auto":
        yield {"order": "tied"}


def _around(spec: StepSpec, update: Update) -> Update:
    if spec.config.order != "tied":
        return update

    def checked(state, batch, **options):
        if not any(ties(spec)):
            warn(_IDLE, SettingWarning)
        return update(state, batch, **options)

    return checked


def _told(spec: StepSpec, target: Target) -> Told:
    if spec.form.order == "free":
        return Told()
    found = ties(spec)
    if any(found):
        return Told(news=(f"tied: {found}; weight gradients are made before the backward pass goes on.",))
    return Told(notes=(_IDLE,) if spec.config.order == "tied" else ())


LEVER = Lever(form=_form, rivals=_rivals, around=_around, told=_told)
