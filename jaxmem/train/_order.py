"""The order of the backward pass as a lever: whether weight gradients are made before it goes on."""

from jaxmem.targets import Target
from jaxmem.train._lever import Lever
from jaxmem.train._spec import StepSpec


def _form(spec: StepSpec, target: Target) -> dict[str, str]:
    asked = spec.config.order
    return {"order": "free" if asked == "auto" else asked}


LEVER = Lever(form=_form)
