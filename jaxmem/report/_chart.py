"""Charts for notebooks as data of a template: paths of SVG, and what a pointer reads over each place of them.

No script draws them, so they need none, and none is stripped. What is read while hovering stands in attributes: where
styles are stripped, nothing spills into the text.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from jaxmem._units import format_bytes, format_flops, format_seconds
from jaxmem.analysis import MemoryReport, Moment, Timeline
from jaxmem.remat import Frontier, FrontierPoint
from jaxmem.report._page import fullest, in_order
from jaxmem.report._views import label, style
from jaxmem.report.differences import family
from jaxmem.report.frontier import costs_of

WIDTH, HEIGHT = 1000, 300
_MOST_MOMENTS = 180
_MOST_LOOPS = 12
_NAMED_SHARE = 0.005
_CAPACITY_SHOWN = 2.5  # a capacity of more than this times the largest value would flatten all bars,
_CAPACITY_CHARTED = 1.4  # and of this a chart
_LAYER_SHARE = 0.03  # of the peak
_SHADES = ("0%", "20%", "36%", "50%", "62%", "72%")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spot:
    """A place to hover over: its left edge and width, or its middle, in percent; and the text."""

    left: str
    width: str = "0"
    bottom: str = "0"
    text: str
    side: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """Bytes of a kind, or of one layer of it, at each moment; `shade` is how much of the background is mixed in."""

    kind: str
    layer: str = ""
    shade: str
    sizes: tuple[int, ...]

    @property
    def style(self) -> str:
        """The CSS class of its kind."""
        return style(self.kind)

    @property
    def most(self) -> str:
        """The most that it ever holds."""
        return format_bytes(max(self.sizes))


def scale_of(
    peaks: Sequence[int | None], capacity: int | None, most_times: float = _CAPACITY_SHOWN
) -> tuple[int, bool]:
    """The bytes of a whole bar, and whether the capacity is on it.

    >>> scale_of([10, None, 30], 40), scale_of([10], 4000)
    ((40, True), (10, False))
    """
    most = max([*(peak or 0 for peak in peaks), 1])
    shown = capacity is not None and 0 < capacity <= most_times * most
    return (max(most, capacity or 0) if shown else most), shown


def timeline_chart(report: MemoryReport) -> dict[str, Any] | None:
    """Live bytes over the schedule as areas by kind, one above the other; None without a timeline."""
    timeline = report.timeline
    if timeline is None or not timeline.moments:
        return None
    moments = fullest(timeline.moments, _MOST_MOMENTS)
    ends = [moment.position for moment in moments[1:]] + [max(timeline.length, moments[-1].position + 1)]
    first, last = moments[0].position, ends[-1]
    alive = [moment.live_bytes for moment in moments]
    scale, shown = scale_of(alive, report.capacity_bytes, _CAPACITY_CHARTED)

    def x(position: int) -> float:
        return (position - first) / (last - first)

    parts = _parts(timeline, moments)
    totals = [0] * len(moments)
    areas = []
    for part in parts:
        totals = [total + size for total, size in zip(totals, part.sizes, strict=True)]
        steps = "".join(
            f"V{HEIGHT * (1 - total / scale):.0f}H{WIDTH * x(end):.0f}" for total, end in zip(totals, ends, strict=True)
        )
        areas.append({"style": style(part.kind), "shade": part.shade, "path": f"M0 {HEIGHT}{steps}V{HEIGHT}Z"})
    loops = [loop for loop in timeline.loops if loop.end > loop.start][:_MOST_LOOPS]
    peak = max(moments, key=lambda moment: moment.live_bytes)
    return {
        "areas": areas[::-1],  # the sum of all lies behind
        "layers": [part for part in parts if part.layer],
        "spots": [
            _spot(100 * x(moment.position), 100 * x(end), _moment(moment, number, parts, timeline.length))
            for number, (moment, end) in enumerate(zip(moments, ends, strict=True))
        ],
        "width": WIDTH,
        "height": HEIGHT,
        "peak": {"left": _percent(100 * x(timeline.peak_position)), "size": format_bytes(peak.live_bytes)},
        "top": format_bytes(scale),
        "capacity": _percent(100 * (report.capacity_bytes or 0) / scale) if shown else "",
        "loops": [
            {
                "left": _percent(100 * x(max(loop.start, first))),
                "width": _percent(100 * (x(loop.end + 1) - x(max(loop.start, first)))),
                "name": loop.name if loop.trips is None else f"{loop.name} × {loop.trips}",
            }
            for loop in loops
        ],
    }


def _parts(timeline: Timeline, moments: Sequence[Moment]) -> list[Part]:
    """The kinds in their order. One that is most of the memory is cut into the layers that hold most of it."""
    kinds = in_order(kind for moment in moments for kind, size in moment.by_kind if size)
    sizes = {kind: tuple(dict(moment.by_kind).get(kind, 0) for moment in moments) for kind in kinds}
    chief = max(kinds, key=lambda kind: max(sizes[kind]))
    peak = max(moment.live_bytes for moment in moments)
    parts = []
    for kind in kinds:
        layers = _layers(timeline, moments, kind, peak) if kind == chief and max(sizes[kind]) >= peak / 2 else {}
        left = list(sizes[kind])
        for number, (layer, held) in enumerate(layers.items()):
            taken = [min(size, rest) for size, rest in zip(held, left, strict=True)]
            left = [rest - size for rest, size in zip(left, taken, strict=True)]
            parts.append(Part(kind=kind, layer=layer, shade=_SHADES[number], sizes=tuple(taken)))
        parts.append(Part(kind=kind, shade=_SHADES[len(layers)] if layers else "0%", sizes=tuple(left)))
    return parts


def _layers(timeline: Timeline, moments: Sequence[Moment], kind: str, peak: int) -> dict[str, list[int]]:
    """Layer → bytes at each moment, of those that hold most of a kind; layers that differ in numbers are one."""
    positions = [moment.position for moment in moments]
    changes: dict[str, list[int]] = {}
    names: dict[str, set[str]] = {}
    for buffer in timeline.buffers:
        if buffer.kind == kind and buffer.layer and buffer.memory_space == "device":
            change = changes.setdefault(family(buffer.layer), [0] * (len(moments) + 1))
            names.setdefault(family(buffer.layer), set()).add(buffer.layer)
            change[bisect.bisect_left(positions, buffer.start)] += buffer.size_bytes
            change[bisect.bisect_right(positions, buffer.end)] -= buffer.size_bytes
    held = {layer: list(itertools.accumulate(change[:-1])) for layer, change in changes.items()}
    worth = [layer for layer in held if max(held[layer]) >= _LAYER_SHARE * peak]
    worth.sort(key=lambda layer: -max(held[layer]))
    alone = {layer: min(each) for layer, each in names.items() if len(each) == 1}
    return {alone.get(layer, layer): held[layer] for layer in worth[: len(_SHADES) - 1]}


def _moment(moment: Moment, number: int, parts: list[Part], length: int) -> str:
    total = moment.live_bytes
    kinds = [(kind, size) for kind, size in moment.by_kind if size > _NAMED_SHARE * total]
    lines = [f"{format_bytes(total)} alive, at {moment.position:,} of {length:,}"]
    for kind, size in sorted(kinds, key=lambda pair: -pair[1]):
        lines.append(f"{label(kind)} {format_bytes(size)}")
        layers = [(part.layer, part.sizes[number]) for part in parts if part.layer and part.kind == kind]
        lines += [f"\u2003{layer} {format_bytes(size)}" for layer, size in layers if size > _NAMED_SHARE * total]
    where = " · ".join(filter(None, (moment.op, moment.layer, moment.source)))
    return "\n".join([*lines, *([where[:160]] if where else [])])


def frontier_chart(frontier: Frontier) -> dict[str, Any]:
    """Bytes against price: the chosen points with a line, the policies as marks of another shape."""
    every = (*frontier.points, *frontier.policies)
    bytes_scale = max((point.total_bytes for point in every), default=1) * 1.04 or 1
    price_scale = max((point.price for point in every), default=1.0) * 1.08 or 1

    def at(point: FrontierPoint) -> tuple[float, float]:
        return 100 * point.total_bytes / bytes_scale, 100 * point.price / price_scale

    def marks(points: tuple[FrontierPoint, ...]) -> list[dict[str, Any]]:
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for point in points:
            left, bottom = at(point)
            side = "right" if left > 50 else "left"
            text = "\n".join(filter(None, (point.name, *costs_of(point))))
            spot = Spot(left=_percent(left), bottom=_percent(bottom), text=text, side=side)
            there = found.setdefault((round(left), round(bottom / 4)), {"spots": [], "names": []})
            there["spots"].append(spot)
            there["names"].append(point.name)
        return [{**there, "name": ", ".join(there["names"])} for there in found.values()]

    # A budget between two points buys what the smaller one does; the bound between them is that of the larger.
    line = bound = ""
    for point in frontier.points:
        x, y, least = WIDTH * point.total_bytes / bytes_scale, HEIGHT, HEIGHT
        y *= 1 - point.price / price_scale
        least *= 1 - (point.bound or 0.0) / price_scale
        line += f"H{x:.0f}V{y:.0f}" if line else f"M{x:.0f} {y:.0f}"
        bound += f"V{least:.0f}H{x:.0f}" if bound else f"M{x:.0f} {least:.0f}"
    top = format_seconds(price_scale) if frontier.objective == "seconds" else format_flops(int(price_scale))
    what = "recomputed and kept" if frontier.objective == "seconds" else "recomputed"
    return {
        "width": WIDTH,
        "height": HEIGHT,
        "line": line,
        "bound": bound,
        "points": marks(frontier.points),
        "policies": marks(frontier.policies),
        "right": format_bytes(int(bytes_scale)),
        "top": top,
        "what": what,
    }


def _spot(left: float, right: float, text: str) -> Spot:
    side = "right" if left > 50 else "left"
    return Spot(left=_percent(left), width=_percent(right - left), text=text, side=side)


def _percent(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") + "%"
