"""Random bits as a lever: whether masks are fenced, and which generator draws."""

from jaxmem.targets import Target
from jaxmem.train._lever import Lever
from jaxmem.train._spec import StepSpec


def _form(spec: StepSpec, target: Target) -> dict[str, str]:
    asked = spec.config.random
    return {"random": "free" if asked == "auto" else asked}


LEVER = Lever(form=_form)
