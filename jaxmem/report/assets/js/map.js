// Buffers as rectangles, schedule by offset. Offsets count within an allocation, so these stand on one another:
// first those alive throughout (arguments), then the temporaries.
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

  page.charts.push((report) => {
    const read = page.reader(report);
    const every = Array.from({ length: report.buffers.count }, (_, i) => read(i)).filter((b) => b.memory_space === "device" && b.size_bytes > 0);
    const length = Math.max(report.timeline?.length ?? 0, ...every.map((b) => b.end + 1), 0);
    if (!page.shows("map", every.length > 0 && length > 1)) return;
    const largest = choose(every);
    const { floor, height } = floors(largest, length);
    const unit = page.unit(height);
    const kinds = [...new Set(largest.map((b) => b.kind))];
    const traces = kinds.map((kind) => {
      const some = largest.filter((b) => b.kind === kind);
      return {
        type: "bar",
        name: page.label(kind),
        x: some.map((b) => (b.start + b.end + 1) / 2),
        width: some.map((b) => b.end - b.start + 1),
        base: some.map((b) => (floor.get(b.allocation) + b.offset_bytes) / unit.size),
        y: some.map((b) => b.size_bytes / unit.size),
        hovertext: some.map((b) => page.hover([...page.describe(b), `alive ${b.start}–${b.end}`])),
        hovertemplate: "%{hovertext}<extra></extra>",
        marker: { color: page.kindColour(kind), line: { width: some.map((b) => (b.size_bytes > height / 80 ? 0.5 : 0)), color: page.colour("--surface") } },
      };
    });
    const shapes = [];
    const annotations = [];
    if (report.timeline) {
      const x = report.timeline.peak_position + 0.5;
      shapes.push({ type: "line", yref: "paper", x0: x, x1: x, y0: 0, y1: 1, line: { color: page.colour("--text"), width: 1, dash: "dot" } });
      annotations.push({ x, yref: "paper", y: 1, yanchor: "bottom", showarrow: false, text: "peak", font: { color: page.colour("--text"), size: 12 } });
    }
    page.legend("map", kinds);
    const layout = page.layout({
      barmode: "overlay",
      hovermode: "closest",
      dragmode: "zoom",
      shapes,
      annotations,
      xaxis: { range: [0, length], title: { text: "position in the schedule" }, showgrid: false },
      yaxis: { range: [0, (1.02 * height) / unit.size], ticksuffix: ` ${unit.name}` },
    });
    return Plotly.react("map-chart", traces, layout, page.config);
  });
})();
