// Buffers as rectangles, schedule by offset. Offsets count within an allocation, so these stand on one another:
// first those alive throughout (arguments), then the temporaries. A click selects a buffer in the table.
"use strict";
(function () {
  const MOST = 400;

  // Half of them for their bytes, half for the area that they take here: small ones that last are seen too.
  function choose(buffers) {
    const sorted = (size) => [...buffers].sort((a, b) => size(b) - size(a));
    const chosen = new Set(sorted((b) => b.size_bytes).slice(0, MOST / 2));
    for (const b of sorted((b) => b.size_bytes * (b.end - b.start + 1))) {
      if (chosen.size >= MOST) break;
      chosen.add(b);
    }
    return [...chosen];
  }

  function floors(buffers, length) {
    const heights = new Map();
    for (const b of buffers) {
      const known = heights.get(b.allocation) ?? { height: 0, lasting: true };
      known.height = Math.max(known.height, b.offset_bytes + b.size_bytes);
      known.lasting &&= b.start <= 0 && b.end >= length - 1;
      heights.set(b.allocation, known);
    }
    const order = [...heights].sort(([a, x], [b, y]) => y.lasting - x.lasting || y.height - x.height || a - b);
    let at = 0;
    const floor = new Map();
    for (const [allocation, { height }] of order) {
      floor.set(allocation, at);
      at += height;
    }
    return { floor, height: at };
  }

  function draw(report) {
    const every = page.buffersOf(report).filter((b) => b.memory_space === "device" && b.size_bytes > 0);
    const length = Math.max(report.timeline?.length ?? 0, ...every.map((b) => b.end + 1), 0);
    if (!page.shows("map", every.length > 0 && length > 1)) return;
    const largest = choose(every);
    const selected = every.find((b) => b.index === page.selected);
    if (selected && !largest.includes(selected)) largest.push(selected);
    const { floor, height } = floors(largest, length);
    const unit = page.unit(height);
    const grouping = page.grouping(report);
    const keys = [...new Set(largest.map(grouping.of))];
    const traces = keys.map((key) => {
      const some = largest.filter((b) => grouping.of(b) === key);
      return {
        type: "bar",
        name: grouping.label(key),
        customdata: some.map((b) => b.index),
        x: some.map((b) => (b.start + b.end + 1) / 2),
        width: some.map((b) => b.end - b.start + 1),
        base: some.map((b) => (floor.get(b.allocation) + b.offset_bytes) / unit.size),
        y: some.map((b) => b.size_bytes / unit.size),
        hovertext: some.map((b) => page.hover([...page.describe(b), `alive ${b.start}–${b.end}`])),
        hovertemplate: "%{hovertext}<extra></extra>",
        marker: { color: page.groupColour(grouping, key), line: { width: some.map((b) => (b.size_bytes > height / 80 ? 0.5 : 0)), color: page.colour("--surface") } },
      };
    });
    const shapes = [];
    const annotations = [];
    if (report.timeline) {
      const x = report.timeline.peak_position + 0.5;
      shapes.push({ type: "line", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: page.colour("--text"), width: 1, dash: "dot" } });
      annotations.push({ x, yref: "paper", y: 1, yanchor: "bottom", showarrow: false, text: "peak", font: { color: page.colour("--text"), size: 12 } });
    }
    if (selected) {
      const base = (floor.get(selected.allocation) + selected.offset_bytes) / unit.size;
      shapes.push({ type: "rect", name: "selected", x0: selected.start, x1: selected.end + 1, y0: base, y1: base + selected.size_bytes / unit.size, line: { color: page.colour("--text"), width: 2.5 } });
    }
    const strip = page.phaseStrip(report, 0, length, page.one("map-chart").clientWidth - 80);
    shapes.push(...strip.shapes);
    annotations.push(...strip.annotations);
    page.legend("map", grouping, keys);
    const layout = page.layout({
      barmode: "overlay",
      hovermode: "closest",
      dragmode: "zoom",
      shapes,
      annotations,
      xaxis: { range: [0, length], title: { text: "position in the schedule" }, showgrid: false, ...strip.xaxis },
      yaxis: { range: [0, (1.02 * height) / unit.size], ticksuffix: ` ${unit.name}`, ...strip.yaxis },
    });
    return Plotly.react("map-chart", traces, layout, page.config);
  }

  page.charts.push(async (report) => {
    await draw(report);
    const chart = page.one("map-chart");
    if (!chart.on || chart.dataset.follows) return;
    chart.dataset.follows = "click";
    chart.on("plotly_click", ({ points }) => page.select(points[0].customdata));
  });
  page.drawMap = () => (typeof Plotly !== "undefined" ? draw(page.report) : undefined);
})();
