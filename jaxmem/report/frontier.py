"""The curve of memory against recomputation, as a plot and for a terminal."""

from typing import TYPE_CHECKING

from rich.console import Group
from rich.text import Text

from jaxmem._units import format_bytes, format_flops, format_seconds
from jaxmem.remat import Frontier, FrontierPoint
from jaxmem.report.terminal import table

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("B", 1))


def frontier_figure(frontier: Frontier) -> "Figure":
    """Bytes against price: what was chosen, what no choice is cheaper than, and JAX's own policies; modelled.

    >>> import jax.numpy as jnp
    >>> from jaxmem import remat
    >>> curve = remat.frontier(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).sum())(jnp.ones((8, 8)), jnp.ones((8, 8)))
    >>> [trace.name for trace in frontier_figure(curve).data]
    ['chosen', 'no choice is cheaper', 'JAX policies']
    """
    from plotly import graph_objects  # takes half a second that only a plot is worth

    every = (*frontier.points, *frontier.policies)
    most = max(point.total_bytes for point in every)
    unit, size = next((unit, size) for unit, size in _UNITS if most >= size or size == 1)
    seconds = frontier.objective == "seconds"
    scale = 1e3 if seconds else 1.0

    def trace(name: str, points: tuple[FrontierPoint, ...], price, **style):
        return graph_objects.Scatter(
            name=name,
            x=[point.total_bytes / size for point in points],
            y=[price(point) * scale for point in points],
            hovertext=[_hover(point) for point in points],
            hoverinfo="text",
            **style,
        )

    chosen, bound = (lambda point: point.price), (lambda point: point.bound)
    # A budget between two points buys what the smaller point does; the bound between them is that of the larger.
    line, dotted = {"shape": "hv", "color": "#1d4ed8"}, {"shape": "vh", "dash": "dot", "width": 1.5, "color": "gray"}
    marked = {"symbol": "diamond", "size": 10, "color": "#c2410c"}
    named = {"text": [point.name for point in frontier.policies], "textposition": "top center"}
    return graph_objects.Figure(
        [
            trace("chosen", frontier.points, chosen, mode="lines+markers", line=line),
            trace("no choice is cheaper", frontier.points, bound, mode="lines", line=dotted),
            trace("JAX policies", frontier.policies, chosen, mode="markers+text", marker=marked, **named),
        ],
        {
            "template": "plotly_white",
            "xaxis": {"title": {"text": f"kept and working set, {unit}, modelled"}, "rangemode": "tozero"},
            "yaxis": {
                "title": {"text": "recomputed and kept, ms, modelled" if seconds else "recomputed FLOPs, modelled"},
                "rangemode": "tozero",
                "exponentformat": "SI",
            },
            "legend": {"orientation": "h", "y": 1.08},
        },
    )


def costs_of(point: FrontierPoint) -> tuple[str, str]:
    """The bytes of a point, and what it recomputes, in words."""
    recomputed = f"{format_flops(int(point.recompute_flops))} and {format_seconds(point.recompute_seconds)} recomputed"
    return f"{format_bytes(point.total_bytes)}, of these {format_bytes(point.kept_bytes)} kept", recomputed


def _hover(point: FrontierPoint) -> str:
    return "<br>".join(filter(None, (point.name and f"<b>{point.name}</b>", *costs_of(point))))


def render_frontier(frontier: Frontier) -> Group:
    """A line for each point, the fewest bytes first, JAX's own policies among them; for a terminal."""
    rows = sorted((*frontier.points, *frontier.policies), key=lambda p: (p.kept_bytes, -p.recompute_flops))
    numbers = ("kept", "with working set", "recomputed", "in", "with keeping")
    made = table((*numbers, "policy"), right=numbers)
    for p in rows:
        sizes = format_bytes(p.kept_bytes), format_bytes(p.total_bytes), format_flops(int(p.recompute_flops))
        # Keeping takes time too, which is in the price; with "flops" the price is what is recomputed.
        price = format_seconds(p.price) if frontier.objective == "seconds" else "-"
        made.add_row(*sizes, format_seconds(p.recompute_seconds), price, Text(p.name or "(chosen)"))
    refused = [Text(f"{name}: {why}") for name, why in frontier.refused]
    return Group(made, *refused, Text(f"\n{frontier.provenance}, by {frontier.objective}", style="dim"))
