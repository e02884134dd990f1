"""Values of the forward pass that wait for the backward pass, and those kept twice."""

import math
from collections.abc import Mapping, Sequence

from jaxmem.analysis._cures import Asked, recompute
from jaxmem.analysis._records import Buffer, Finding
from jaxmem.analysis.attribution._origin import Origin
from jaxmem.analysis.attribution._scopes import parse_scope
from jaxmem.analysis.findings._words import common, groups, names, within
from jaxmem.analysis.hlo._module import Module
from jaxmem.analysis.hlo._types import parse_shape


def kept_for_backward(
    activations: Sequence[Buffer],
    origins: Mapping[str, Origin],
    module: Module,
    schedule: Sequence[str],
    asked: Asked,
) -> list[Finding]:
    """Values of the forward pass that wait for the backward pass: what rematerialisation is for."""

    def waits(buffer: Buffer) -> bool:
        if buffer.phase != "forward":
            return False
        if buffer.name in origins and origins[buffer.name].stacked:
            return True
        user = module.instruction(schedule[buffer.end]) if buffer.end < len(schedule) else None
        return user is not None and parse_scope(user.op_name).phase in ("backward", "recompute")

    kept = sorted((b for b in activations if waits(b)), key=lambda b: -b.size_bytes)
    if not kept:
        return []
    size = sum(b.size_bytes for b in kept)
    cure = recompute(asked, size)
    return [
        Finding(
            kind="residuals",
            size_bytes=size,
            estimated=True,
            title=f"{len(kept)} values of the forward pass wait for the backward pass"
            + within(common([b.layer for b in kept])),
            evidence=names(kept),
            **cure.fields,
        )
    ]


def kept_twice(activations: Sequence[Buffer], origins: Mapping[str, Origin]) -> list[Finding]:
    """Residuals of one origin and as many elements: the same values, cast, transposed or a step of a loop apart."""
    large = [b for b in activations if b.phase == "forward" and b.name in origins and origins[b.name].stacked]
    found = []
    for (_, _, elements), group in groups(
        large, lambda b: (origins[b.name].instruction.name, origins[b.name].part, math.prod(parse_shape(b.layout)))
    ).items():
        if len(group) > 1 and elements > 1:
            group = sorted(group, key=lambda b: b.size_bytes)
            found.append(
                Finding(
                    kind="kept_twice",
                    size_bytes=sum(b.size_bytes for b in group[:-1]),
                    title=f"{group[-1].op}{within(group[-1].layer)} is kept {len(group)} times",
                    evidence=names(group),
                    cure="Name one of them with checkpoint_name and save only that (Policy(save=...)): the others "
                    "follow from it at the price of a cast, a transpose or one step.",
                )
            )
    return found
