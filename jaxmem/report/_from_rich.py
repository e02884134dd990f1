"""What rich prints as HTML: its tables as tables, its texts as paragraphs. So each record is drawn once."""

import html
import io

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

_CLASSES = {"red": "fits-no", "green": "fits-yes", "yellow": "fits-uncertain"}


def as_html(renderable) -> str:
    """HTML of a renderable; what is neither text, table nor group stands as it is printed.

    >>> as_html(Group(Text("at the peak", style="bold"), Text("a < b")))
    '<p><b>at the peak</b></p><p>a &lt; b</p>'
    """
    if isinstance(renderable, Group):
        return "".join(map(as_html, renderable.renderables))
    if isinstance(renderable, Table):
        return _table(renderable)
    if isinstance(renderable, str | Text):
        words = _inline(renderable)
        return f"<p>{words}</p>" if words else ""
    out = io.StringIO()
    Console(file=out, width=120, color_system=None, force_jupyter=False).print(renderable)
    return f"<pre>{html.escape(out.getvalue())}</pre>"


def _table(table: Table) -> str:
    classes = [' class="number"' if column.justify == "right" else "" for column in table.columns]
    heads = [f"<th{cls}>{_inline(column.header)}</th>" for column, cls in zip(table.columns, classes, strict=True)]
    head = f"<thead><tr>{''.join(heads)}</tr></thead>" if table.show_header else ""
    rows = zip(*(column.cells for column in table.columns), strict=True)
    body = "".join(
        f"<tr>{''.join(f'<td{cls}>{_inline(cell)}</td>' for cell, cls in zip(row, classes, strict=True))}</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table>{head}<tbody>{body}</tbody></table></div>'


def _inline(cell) -> str:
    console = Console(file=io.StringIO(), width=10_000, highlight=False)
    if not isinstance(cell, str | Text):
        return as_html(cell)
    words = console.render_str(cell) if isinstance(cell, str) else cell
    base = console.get_style(words.style)
    made = []
    for text, own, _ in words.render(console, end=""):
        style = base if own is None else base + own
        inside = html.escape(text.strip("\n")).replace("\n", "<br>").replace("  ", "&nbsp; ")
        if style.bold:
            inside = f"<b>{inside}</b>"
        name = _CLASSES.get(style.color.name, "") if style.color is not None else "dim" if style.dim else ""
        made.append(f'<span class="{name}">{inside}</span>' if name and inside else inside)
    return "".join(made)
