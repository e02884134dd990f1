"""Rolling as a lever: repeated unrolled layers run as one scan."""

from jaxmem.targets import Target
from jaxmem.train._lever import Lever
from jaxmem.train._spec import StepSpec


def _form(spec: StepSpec, target: Target) -> dict[str, bool]:
    return {"roll": spec.config.roll is True}


LEVER = Lever(form=_form)
