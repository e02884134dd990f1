"""Verifications, equivalences and examinations for a terminal, as rich renderables."""

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from jaxmem._shown import array_type
from jaxmem.remat import Examination
from jaxmem.report.residuals import render_residuals
from jaxmem.report.terminal import table
from jaxmem.train import Equivalence, Verification

_WORST = 8
_STYLE = {"pass": "green", "fail": "red", "uncertain": "yellow"}


def render_verifications(verifications: Sequence[Verification]) -> Group:
    """A line a variant with the verdict of each promise, and a sentence for what did not pass."""
    names = list(dict.fromkeys(check.name for found in verifications for check in found.checks))
    made = table(("verified", "verdict", *names))
    for found in verifications:
        verdicts = {check.name: check.verdict for check in found.checks}
        cells = [found.verdict, *(verdicts.get(name, "") for name in names)]
        made.add_row(Text(found.name), *(Text(cell, style=_STYLE.get(cell, "")) for cell in cells))
    references = dict.fromkeys(found.reference for found in verifications)
    places = list(dict.fromkeys(found.compared_on for found in verifications if found.compared_on))
    where = f"computed on {' and '.join(places)}" if places else "not computed"
    return Group(
        Text(),
        made,
        *[
            Text(f"{found.name}, {check.name}: {check.verdict}. {check.detail}")
            for found in verifications
            for check in found.checks
            if check.verdict != "pass"
        ],
        Text(f"Gradients against {' or '.join(references)}, {where}.", style="dim"),
        *(Text(note, style="dim") for note in dict.fromkeys(note for found in verifications for note in found.notes)),
    )


def render_verification(found: Verification) -> Group:
    """The verdict, and a line for each promise with its numbers."""
    where = f", gradients computed on {found.compared_on}" if found.compared_on else ""
    made = table(("promise", "verdict", "numbers"))
    for check in found.checks:
        made.add_row(check.name, Text(check.verdict, style=_STYLE[check.verdict]), Text(check.detail))
    return Group(
        Text.assemble(
            (f"{found.name} on {found.target}: ", "bold"),
            (found.verdict, f"bold {_STYLE[found.verdict]}"),
            f", against {found.reference}{where}\n",
        ),
        made,
        *(Text(f"note: {note}", style="dim") for note in found.notes),
    )


def render_equivalence(found: Equivalence) -> Group:
    """What was compared, and the leaves that are furthest apart."""
    said = (
        f"gradients equal {found.reference} to {found.worst_error:.1e}, within {found.tolerance:.0e} ({found.dtype}): "
        f"{len(found):,} leaves"
    )
    made = table(("error", "leaf", "value", "got", "expected", "at"), right=("error", "got", "expected"))
    for leaf in found[:_WORST]:
        what, at = array_type(leaf), ", ".join(map(str, leaf.index))
        cells = (f"{leaf.relative_error:.1e}", leaf.path, what, f"{leaf.got:.6g}", f"{leaf.expected:.6g}", at)
        made.add_row(*map(Text, cells))
    more = len(found) - _WORST
    rest = [Text(f"and {more:,} more leaves, which are nearer", style="dim")] if more > 0 else []
    return Group(Text(said, style="bold"), Text("\nthe worst leaves, by relative error", style="bold"), made, *rest)


def render_examination(found: Examination) -> Group:
    """The residuals, and what the policy does not do."""
    blocks = f"{found.blocks} call{'s' if found.blocks != 1 else ''} of blocks"
    names = f", which offer {', '.join(found.names)}" if found.names else ""
    warnings = [Text(f"! {warning}", style="yellow") for warning in found.warnings]
    return Group(render_residuals(found.residuals), Text(f"\n{blocks}{names}"), *warnings)
