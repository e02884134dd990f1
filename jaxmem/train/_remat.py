"""Rematerialisation as a lever: what a setting does to the loss, found by a dry trace, and what a report says of it."""

import dataclasses
import math

from jaxmem import remat
from jaxmem._blame import warn
from jaxmem._source import short_place
from jaxmem._units import format_bytes
from jaxmem.errors import RematWarning
from jaxmem.objective import LossOutput
from jaxmem.policy import as_policy
from jaxmem.targets import Target, on_target
from jaxmem.train._lever import Lever, Told, Update
from jaxmem.train._spec import StepSpec, once

_FULL = as_policy("full")
_WORTH_SAYING = 0.25  # of what full rematerialisation keeps
_NOT_EVIDENCED = (
    "Offload is not evidenced here: XLA:CPU keeps host and device values in one memory, and counts neither."
)


@once
def examine(spec: StepSpec) -> remat.Examination:
    """Whether the remat setting does anything to the loss of the first micro-batch.

    Raises:
      UnmatchedNamesError: no block of the loss offers a name of the policy.
      RematWithoutEffect: the loss marks no block.
    """

    def loss(checkpoint):
        def objective(trainable, frozen, batch, rng, state):
            output = spec.loss(frozen, checkpoint=checkpoint)(trainable, batch, rng=rng, state=state)
            return output.objective if isinstance(output, LossOutput) else output

        return objective

    with spec.entered():
        return remat.examine(loss, *spec.loss_arguments(), argnums=0, policy=spec.config.policy)


def residual_table(spec: StepSpec, target: Target) -> remat.ResidualTable:
    """What one micro-batch keeps for its backward pass; where there is remat, with the table of the plain loss."""
    plain, table = spec.without_remat(), kept(spec, target)
    return table if plain is spec else dataclasses.replace(table, before=kept(plain, target))


def kept(spec: StepSpec, target: Target) -> remat.ResidualTable:
    """What one micro-batch keeps for its backward pass, as a target stores it."""
    return examine(spec).residuals.stored_in(target.tiles, plain=spec.without_remat() is spec)


def solution(spec: StepSpec) -> remat.Solution:
    """What the remat budget of a spec with a decision was spent on."""
    assert spec.decision is not None
    budget = spec.config.budget
    with spec.entered():
        return spec.decision.solution(budget_bytes=None if budget is None else budget.bytes)


def _around(spec: StepSpec, update: Update) -> Update:
    """Before the update is traced, names that match nothing raise, and a setting that saves nothing warns."""
    if spec.config.policy.keeps_everything:
        return update

    def checked(state, batch, **options):
        for message in examine(spec).warnings:
            warn(message, RematWarning)
        return update(state, batch, **options)

    return checked


def _told(spec: StepSpec, target: Target) -> Told:
    policy, budget = spec.config.policy, spec.config.budget
    notes, news = list(examine(spec).warnings), []
    if policy.offload and target.platform == "cpu":
        notes.append(_NOT_EVIDENCED)
    if policy == _FULL:
        with spec.entered():
            notes += _left(examine(spec), target)
    if spec.decision is not None and budget is not None:
        news.append(solution(spec).summary)

    def plain_residual_bytes() -> int | None:
        if examine(spec).inside:
            return None  # what is kept while a segment is recomputed is no residual of the forward pass
        with on_target(target):  # a loss may need its mesh
            # Fused values count here, as they do under a policy: what is equal is a setting without effect.
            return examine(spec.without_remat()).residuals.stored_in(target.tiles).stored_bytes

    fields = {
        "remat": str(policy if budget is None else spec.config.remat),
        "saved_residual_bytes": lambda: kept(spec, target).stored_bytes,
        # A budget may be enough to keep everything.
        "plain_residual_bytes": None if budget is not None else plain_residual_bytes,
        "saved_names": lambda: _saved_names(examine(spec)),
    }
    return Told(notes=tuple(notes), news=tuple(news), fields=fields)


def _left(found: remat.Examination, target: Target) -> list[str]:
    """What full rematerialisation leaves: a loss's logits, what lies before the first block."""
    try:
        rows = found.outside() if found.outside is not None else ()
    except Exception:  # blocks with effects that no custom derivative may have: a note is not worth the report
        return []
    outside = remat.ResidualTable(rows=tuple(rows)).stored_in(target.tiles).rows
    left, kept = sum(row.held_bytes for row in outside), found.residuals.stored_in(target.tiles).stored_bytes
    if left < _WORTH_SAYING * kept:
        return []
    by_line: dict[str, int] = {}
    for row in outside:
        place = short_place(row.source) or row.module or "-"
        by_line[f"{row.op} ({place})"] = by_line.get(f"{row.op} ({place})", 0) + row.held_bytes
    largest = sorted(by_line.items(), key=lambda item: -item[1])[:3]
    named = [f"{format_bytes(size)} {what}" for what, size in largest]
    return [
        f"full leaves {format_bytes(left)} of its {format_bytes(kept)} of residuals outside of blocks, the largest "
        f"{', '.join(named)}: a budget of bytes may choose among these, too."
    ]


def _saved_names(found: remat.Examination) -> dict[tuple[str, int], str]:
    """Names of the values that one micro-batch keeps, by source line and number of elements, where these tell."""
    names: dict[tuple[str, int], set[str]] = {}
    for row in found.residuals.rows:
        names.setdefault((row.source, math.prod(row.shape)), set()).add(row.name or "")
    return {key: next(iter(found)) for key, found in names.items() if len(found) == 1 and found != {""}}


LEVER = Lever(around=_around, told=_told)
