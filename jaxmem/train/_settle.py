"""`settled`: the form of a step on a target, where its config says "auto"."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from jaxmem._settled import Settled
from jaxmem.targets import Target
from jaxmem.train._spec import StepSpec
from jaxmem.train._update import LEVERS


def settled(spec: StepSpec, target: Target) -> StepSpec:
    """The spec with order, roll and random masks as they are on a target; a spec that has a form keeps it.

    The default of "auto" is what was never seen to be worse on the target's kind of chip; nothing is compiled for it.
    """
    if spec.settled is not None:
        return spec
    key = (settled, target.name)
    if key not in spec.known:
        fields = {field: value for lever in LEVERS for field, value in lever.form(spec, target).items()}
        spec.known[key] = spec.in_form(Settled(**fields))
    return spec.known[key]


def rivals(spec: StepSpec, target: Target) -> Iterator[Settled]:
    """Other forms that may win on a target, where the config leaves the form open."""
    form = settled(spec, target).form
    for lever in LEVERS:
        for fields in lever.rivals(spec, target):
            changed: dict[str, Any] = dict(fields)
            yield dataclasses.replace(form, **changed)
