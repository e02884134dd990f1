"""An `OomExplanation` for a terminal, as a rich renderable."""

from rich.console import Group
from rich.table import Table
from rich.text import Text

from jaxmem._units import format_bytes
from jaxmem.analysis.oom import OomBuffer, OomExplanation
from jaxmem.report._views import label
from jaxmem.report.terminal import table

SHOWN_BUFFERS = 10

_MEMORY = {
    "hbm": "device memory",
    "host": "host memory",
    "vmem": "on-chip memory (VMEM)",
    "smem": "on-chip memory (SMEM)",
}
_BACKEND = {"tpu": "TPU out", "gpu": "GPU out", "cpu": "CPU out", "host": "Out"}
_WHEN = {"compile": "at compile time", "run": "at run time"}


def render_oom(said: OomExplanation) -> Group:
    """The verdict, the numbers with the lines they are from, the largest buffers, and what to try."""
    parts = [
        Text.assemble(
            (f"{_BACKEND[said.backend]} of {_MEMORY[said.memory]} {_WHEN[said.when]}", "bold"),
            f" - line {said.line}",
        ),
        Text(said.headline, style="dim"),
    ]
    if said.program:
        parts.append(Text(f"program: {said.program}"))
    if said.where:
        parts.append(Text(f"your code: {said.where} (from the traceback)"))
    parts += [Text(), _numbers(said)]
    if said.buffers:
        parts += [Text("\nlargest buffers", style="bold"), _buffers(said.buffers[:SHOWN_BUFFERS])]
        if len(said.buffers) > SHOWN_BUFFERS:
            parts.append(Text(f"and {len(said.buffers) - SHOWN_BUFFERS} more, in --json", style="dim"))
    parts.append(Text("\nwhat to try", style="bold"))
    for index, advice in enumerate(said.advice, start=1):
        saves = f" - saves about {format_bytes(advice.saves_bytes)} (estimate)" if advice.saves_bytes else ""
        parts += [
            Text.assemble(f"{index}. ", (advice.title, "green"), saves),
            Text(f"   {advice.how}"),
            Text(f"   because: {advice.because}", style="dim"),
        ]
    parts += [Text(f"! {note}", style="yellow") for note in said.notes]
    if said.others:
        parts.append(Text(f"! {said.others} other out-of-memory report(s) stand in this log.", style="yellow"))
    return Group(*parts)


def _numbers(said: OomExplanation) -> Table:
    made = table(("fact", "bytes", "from"), right=("bytes",), header=False)
    for fact in said.facts:
        line = Text(f"line {fact.line}", style="dim")
        made.add_row(label(fact.name), format_bytes(fact.size_bytes), line)
    if said.missing_bytes is not None:
        size = Text(format_bytes(said.missing_bytes), style="red")
        made.add_row("missing", size, Text("from the above", style="dim"))
    return made


def _buffers(buffers: tuple[OomBuffer, ...]) -> Table:
    made = table(("size", "shape", "layer, or op", "source", "line"), right=("size",))
    for b in buffers:
        what = b.layer or b.op_name or b.label or b.allocation
        made.add_row(format_bytes(b.size_bytes), *(Text(cell) for cell in (b.shape, what, b.source, str(b.line))))
    return made
