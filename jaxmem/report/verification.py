"""Verifications for a terminal, as rich renderables."""

from collections.abc import Sequence

from rich.console import Group
from rich.text import Text

from jaxmem.report.terminal import table
from jaxmem.train import Verification

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
