// Live bytes over the schedule. Of the moments in view only as many are drawn as can be told apart: of each
// stretch the fullest and the emptiest, so that no peak is lost, and all of them once one has zoomed in.
"use strict";
(function () {
  const MOST = 900;
  const id = "timeline-chart";
  let line = null; // the report's timeline, decoded
  let view = null; // [from, to] in positions

  function decode(report) {
    const coded = report.timeline;
    const count = coded.positions.length;
    const kinds = coded.kinds.map(() => new Float64Array(count));
    const total = new Float64Array(count);
    const now = new Float64Array(kinds.length);
    let at = 0;
    for (let i = 0; i < count; i++) {
      for (let n = 0; n < coded.counts[i]; n++, at += 2) now[coded.changes[at]] += coded.changes[at + 1];
      for (let k = 0; k < kinds.length; k++) {
        kinds[k][i] = now[k];
        total[i] += now[k];
      }
    }
    let peak = 0;
    for (let i = 0; i < count && coded.positions[i] <= coded.peak_position; i++) peak = i;
    return { coded, kinds, total, peak, strings: report.strings, capacity: report.capacity_bytes, most: total.reduce((a, b) => Math.max(a, b), 0) };
  }

  // Index of the last moment at or before a position.
  function before(position) {
    let low = 0;
    let high = line.coded.positions.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (line.coded.positions[middle] <= position) low = middle;
      else high = middle - 1;
    }
    return low;
  }

  function visible(from, to) {
    const first = before(from);
    const last = Math.min(before(to) + 1, line.coded.positions.length - 1);
    const count = last - first + 1;
    if (count <= MOST) return Array.from({ length: count }, (_, i) => first + i);
    const chosen = new Set([first, last]);
    if (line.peak >= first && line.peak <= last) chosen.add(line.peak);
    const bins = MOST / 2;
    for (let bin = 0; bin < bins; bin++) {
      const start = first + Math.floor((bin * count) / bins);
      const end = first + Math.floor(((bin + 1) * count) / bins);
      let fullest = start;
      let emptiest = start;
      for (let i = start; i < end; i++) {
        if (line.total[i] > line.total[fullest]) fullest = i;
        if (line.total[i] < line.total[emptiest]) emptiest = i;
      }
      chosen.add(fullest).add(emptiest);
    }
    return [...chosen].sort((a, b) => a - b);
  }

  function describe(i) {
    const { coded, strings, kinds } = line;
    const text = (field) => strings[coded[field][i]];
    const largest = coded.kinds
      .map((kind, k) => [kind, kinds[k][i]])
      .filter(([, size]) => size > 0)
      .sort((a, b) => b[1] - a[1])
      .slice(0, 4);
    return page.hover([
      `${page.bytes(line.total[i])} alive at ${coded.positions[i]}`,
      text("layer"), text("op"), text("shape"), text("source"),
      ...largest.map(([kind, size]) => `${page.label(kind)} ${page.bytes(size)}`),
    ]);
  }

  // Loops as bands, inner ones lower; the trip count where there is room for it.
  function loops(from, to) {
    const shapes = [];
    const annotations = [];
    const list = line.coded.loops;
    list.forEach(([name, start, end, trips], index) => {
      if (end < from || start > to) return;
      const depth = list.filter((other, j) => j !== index && other[1] <= start && other[2] >= end && (other[2] - other[1] > end - start || j < index)).length;
      const style = { type: "rect", xref: "x", yref: "paper", x0: start, x1: end + 1, layer: "above" };
      shapes.push({ ...style, y0: 0, y1: 1 - 0.07 * depth, line: { width: 1, color: page.colour("--muted"), dash: "dot" }, fillcolor: "rgba(128,128,128,0.06)" });
      const left = Math.max(start, from);
      const right = Math.min(end + 1, to);
      if (((right - left) / (to - from)) * (page.one(id).clientWidth - 80) < 28) return;
      annotations.push({ xref: "x", yref: "paper", x: left, xanchor: "left", y: 1 - 0.07 * depth, yanchor: depth ? "top" : "bottom", showarrow: false, text: trips === null ? "loop" : `× ${trips}`, hovertext: page.plain(line.strings[name]).slice(0, 80), font: { color: page.colour("--text"), size: 12 }, bgcolor: page.colour("--surface"), opacity: 0.9 });
    });
    return { shapes, annotations };
  }

  function draw() {
    const [from, to] = view;
    const { coded, capacity } = line;
    const chosen = visible(from, to);
    const near = capacity && capacity < 2.5 * line.most; // further up it would flatten all else
    const top = 1.14 * Math.max(line.most, near ? capacity : 0, 1);
    const unit = page.unit(top);
    // The last moment lasts until the schedule's end.
    const x = [...chosen.map((i) => coded.positions[i]), coded.length];
    const held = (values) => [...chosen.map((i) => values[i] / unit.size), values[chosen.at(-1)] / unit.size];
    const traces = coded.kinds.flatMap((kind, k) => {
      if (!line.kinds[k].some((size) => size > 0)) return [];
      return [{ type: "scatter", mode: "lines", x, y: held(line.kinds[k]), name: page.label(kind), stackgroup: "alive", hoverinfo: "skip", line: { shape: "hv", width: 0 }, fillcolor: page.kindColour(kind) }];
    });
    const text = chosen.map(describe);
    traces.push({ type: "scatter", mode: "lines", x, y: held(line.total), text: [...text, text.at(-1)], hovertemplate: "%{text}<extra></extra>", line: { shape: "hv", width: 1, color: page.colour("--text") } });
    const { shapes, annotations } = loops(from, to);
    const where = coded.positions[line.peak];
    const red = page.colour("--bad");
    if (where >= from && where <= to) {
      const side = where < from + 0.12 * (to - from) ? "left" : where > to - 0.12 * (to - from) ? "right" : "center";
      annotations.push({ x: where, y: line.total[line.peak] / unit.size, xanchor: side, yanchor: "bottom", text: `peak ${page.bytes(line.total[line.peak])}`, arrowhead: 2, arrowcolor: page.colour("--text"), ax: 0, ay: -22, font: { color: page.colour("--text"), size: 12 }, bgcolor: page.colour("--surface") });
    }
    if (near) {
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: capacity / unit.size, y1: capacity / unit.size, line: { color: red, width: 1.5, dash: "dash" } });
      annotations.push({ xref: "paper", x: 1, xanchor: "right", y: capacity / unit.size, yanchor: capacity > line.most ? "bottom" : "top", showarrow: false, text: `capacity ${page.bytes(capacity)}`, font: { color: red, size: 12 }, bgcolor: page.colour("--surface") });
    } else if (capacity) {
      annotations.push({ xref: "paper", yref: "paper", x: 1, xanchor: "right", y: 1, yanchor: "bottom", showarrow: false, text: `capacity ${page.bytes(capacity)}, far above`, font: { color: page.colour("--muted"), size: 12 } });
    }
    const layout = page.layout({
      hovermode: "x",
      hoverdistance: -1,
      dragmode: "zoom",
      shapes,
      annotations,
      xaxis: { range: [from, to], title: { text: "position in the schedule" }, showgrid: false, minallowed: 0, maxallowed: coded.length },
      yaxis: { range: [0, top / unit.size], ticksuffix: ` ${unit.name}`, fixedrange: true },
    });
    return Plotly.react(id, traces, layout, page.config);
  }

  let loaded = null;
  page.charts.push(async (report) => {
    if (!page.shows("timeline", Boolean(report.timeline?.positions.length))) return;
    if (loaded !== report) {
      loaded = report;
      line = decode(report);
      view = [0, Math.max(line.coded.length, 1)];
      page.legend("timeline", line.coded.kinds.filter((_, k) => line.kinds[k].some((size) => size > 0)));
    }
    await draw();
    const chart = page.one(id);
    if (chart.dataset.follows) return;
    chart.dataset.follows = "zoom";
    chart.on("plotly_relayout", (change) => {
      if (change["xaxis.autorange"]) view = [0, line.coded.length];
      else if (change["xaxis.range[0]"] !== undefined) view = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      else if (change["xaxis.range"]) view = change["xaxis.range"];
      else return;
      draw();
    });
  });
})();
