"""Narrow gathers as a lever: what gathers of a value that was just widened read, on a TPU. They are no setting."""

from jaxmem import precision
from jaxmem._units import format_bytes
from jaxmem.precision import Widened
from jaxmem.targets import Target, on_target
from jaxmem.train._lever import Lever, Told
from jaxmem.train._spec import StepSpec, loss_program, once


def widened(spec: StepSpec) -> tuple[Widened, ...]:
    """The gathers of large widened values in the loss of one micro-batch, as it is written; traced, not compiled."""
    return _widened(spec.as_written)


@once
def _widened(spec: StepSpec) -> tuple[Widened, ...]:
    return precision.widened_gathers(loss_program(spec))


def _form(spec: StepSpec, target: Target) -> dict[str, str]:
    # XLA:GPU fuses casts into gathers by itself.
    return {"gathers": "narrow" if target.platform == "tpu" and _found_on(spec, target) else "as written"}


def _found_on(spec: StepSpec, target: Target) -> bool:
    try:
        with on_target(target):
            return bool(widened(spec))
    except Exception:  # whoever traces the step says what is wrong with it, and whose fault that is
        return False


def _told(spec: StepSpec, target: Target) -> Told:
    found = widened(spec) if spec.form.gathers == "narrow" else ()
    if not found:
        return Told()
    largest = max(found, key=lambda each: each.num_bytes)
    who = "a gather of the loss reads" if len(found) == 1 else f"{len(found)} gathers of the loss read"
    size = format_bytes(largest.num_bytes)
    copy = f"a {largest.wide} copy of them, {size} a micro-batch{'' if len(found) == 1 else ' at the largest'}"
    return Told(news=(f"{who} {largest.narrow} numbers as they are computed, and not {copy}.",))


LEVER = Lever(form=_form, told=_told)
