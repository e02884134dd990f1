// Live bytes over the schedule, by kind, layer or phase. Of the moments in view only as many are drawn as can be told
// apart: of each stretch the fullest and the emptiest, so that no peak is lost, and all of them once one has zoomed in.
"use strict";
(function () {
  const MOST = 900;
  const UNKNOWN = Symbol("buffers not in this file");
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
    return { report, coded, kinds, total, peak, parts: new Map(), strings: report.strings, capacity: report.capacity_bytes, most: total.reduce((a, b) => Math.max(a, b), 0) };
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

  // The bytes of each group at moment `i`: of kinds the timeline's own, of layers and phases those of the buffers that
  // are known, and the rest of its height.
  function parts(i, grouping) {
    if (grouping.name === "kind") return new Map(line.coded.kinds.map((kind, k) => [kind, line.kinds[k][i]]));
    const place = `${grouping.name} ${i}`;
    if (!line.parts.has(place)) {
      const sums = new Map();
      const known = page.aliveAt(line.report, line.coded.positions[i], (b, own) => sums.set(grouping.of(b), (sums.get(grouping.of(b)) ?? 0) + own));
      if (line.total[i] > known) sums.set(UNKNOWN, line.total[i] - known);
      line.parts.set(place, sums);
    }
    return line.parts.get(place);
  }
  const labelOf = (key, grouping) => (key === UNKNOWN ? "buffers not in this file" : grouping.label(key));

  function describe(i, grouping) {
    const { coded, strings } = line;
    const text = (field) => (coded[field] ? strings[coded[field][i]] : "");
    const largest = [...parts(i, grouping)].filter(([, size]) => size > 0).sort((a, b) => b[1] - a[1]).slice(0, 4);
    return page.hover([
      `${page.bytes(line.total[i])} alive at ${coded.positions[i]}`,
      text("layer"), [text("op"), text("phase")].filter(Boolean).join(" · "), text("shape"), text("source"), page.codeAt(line.report, text("source")),
      ...largest.map(([key, size]) => `${labelOf(key, grouping)} ${page.bytes(size)}`),
    ]);
  }

  // The moment at or before a position, for the list of what is alive there.
  page.momentAt = function (position) {
    const i = before(position);
    return { position: line.coded.positions[i], total: line.total[i], text: (field) => (line.coded[field] ? line.strings[line.coded[field][i]] : "") };
  };

  // Loops as bands, inner ones lower; the trip count where there is room for it.
  function loops(from, to) {
    const shapes = [];
    const annotations = [];
    const list = line.coded.loops;
    list.forEach(([name, start, end, trips], index) => {
      if (end < from || start > to) return;
      const depth = list.filter((other, j) => j !== index && other[1] <= start && other[2] >= end && (other[2] - other[1] > end - start || j < index)).length;
      const style = { type: "rect", xref: "x", yref: "paper", x0: start, x1: end + 1, layer: "above" };
      shapes.push({ ...style, name: "loop", y0: 0, y1: 1 - 0.07 * depth, line: { width: 1, color: page.colour("--muted"), dash: "dot" }, fillcolor: "rgba(128,128,128,0.06)" });
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
    const near = capacity && capacity < 1.6 * line.most; // further up it would flatten all else
    const top = 1.14 * Math.max(line.most, near ? capacity : 0, 1);
    const unit = page.unit(top);
    // The last moment lasts until the schedule's end.
    const x = [...chosen.map((i) => coded.positions[i]), coded.length];
    const held = (values) => [...chosen.map((i) => values[i] / unit.size), values[chosen.at(-1)] / unit.size];
    const grouping = page.grouping(line.report);
    const known = chosen.map((i) => parts(i, grouping));
    const keys = new Set(known.flatMap((sums) => [...sums].filter(([, size]) => size > 0).map(([key]) => key)));
    const stacked = [...keys].filter((key) => key !== UNKNOWN).sort((a, b) => grouping.rank(a) - grouping.rank(b));
    page.legend("timeline", grouping, stacked);
    const traces = [...stacked, ...(keys.has(UNKNOWN) ? [UNKNOWN] : [])].map((key) => {
      const y = known.map((sums) => (sums.get(key) ?? 0) / unit.size);
      const colour = key === UNKNOWN ? page.kindColour("unattributed") : page.groupColour(grouping, key);
      return { type: "scatter", mode: "lines", x, y: [...y, y.at(-1)], name: labelOf(key, grouping), stackgroup: "alive", hoverinfo: "skip", line: { shape: "hv", width: 0 }, fillcolor: colour };
    });
    const text = chosen.map((i) => describe(i, grouping));
    traces.push({ type: "scatter", mode: "lines", x, y: held(line.total), text: [...text, text.at(-1)], hovertemplate: "%{text}<extra></extra>", line: { shape: "hv", width: 1, color: page.colour("--text") } });
    const { shapes, annotations } = loops(from, to);
    const strip = page.phaseStrip(line.report, from, to, page.one(id).clientWidth - 80);
    shapes.push(...strip.shapes);
    annotations.push(...strip.annotations);
    if (page.position !== null) {
      const at = page.position + 0.5;
      shapes.push({ type: "line", name: "position", yref: "paper", x0: at, x1: at, y0: 0, y1: 1, line: { color: page.colour("--accent"), width: 2 } });
    }
    const where = coded.positions[line.peak];
    const red = page.colour("--bad");
    if (where >= from && where <= to) {
      const height = page.bytes(line.total[line.peak]); // without what lies unused between buffers
      const side = where < from + 0.12 * (to - from) ? "left" : where > to - 0.12 * (to - from) ? "right" : "center";
      annotations.push({ x: where, y: line.total[line.peak] / unit.size, xanchor: side, yanchor: "bottom", text: `peak ${height}${height === page.bytes(line.report.peak_bytes) ? "" : " in buffers"}`, arrowhead: 2, arrowcolor: page.colour("--text"), ax: 0, ay: -22, font: { color: page.colour("--text"), size: 12 }, bgcolor: page.colour("--surface") });
    }
    if (near) {
      shapes.push({ type: "line", xref: "paper", x0: 0, x1: 1, y0: capacity / unit.size, y1: capacity / unit.size, line: { color: red, width: 1.5, dash: "dash" } });
      annotations.push({ xref: "paper", x: 1, xanchor: "right", y: capacity / unit.size, yanchor: capacity > line.most ? "bottom" : "top", showarrow: false, text: `capacity ${page.bytes(capacity)}`, font: { color: red, size: 12 }, bgcolor: page.colour("--surface") });
    } else if (capacity && page.one(id).clientWidth > 600) {
      annotations.push({ xref: "paper", yref: "paper", x: 1, xanchor: "right", y: 1, yanchor: "bottom", showarrow: false, text: `capacity ${page.bytes(capacity)}, far above`, font: { color: page.colour("--muted"), size: 12 } });
    }
    const layout = page.layout({
      hovermode: "x",
      hoverdistance: -1,
      dragmode: "zoom",
      shapes,
      annotations,
      xaxis: { range: [from, to], title: { text: "position in the schedule" }, showgrid: false, minallowed: 0, maxallowed: coded.length, ...strip.xaxis },
      yaxis: { range: [0, top / unit.size], ticksuffix: ` ${unit.name}`, fixedrange: true, ...strip.yaxis },
    });
    return Plotly.react(id, traces, layout, page.config);
  }

  page.position = null; // of the moment that is listed below the chart
  page.drawTimeline = () => (line && typeof Plotly !== "undefined" ? draw() : undefined);
  let loaded = null;
  page.charts.push(async (report) => {
    if (!page.shows("timeline", Boolean(report.timeline?.positions.length))) return;
    if (loaded !== report) {
      loaded = report;
      page.position = null;
      line = decode(report);
      view = [0, Math.max(line.coded.length, 1)];
    }
    await draw();
    const chart = page.one(id);
    if (chart.dataset.follows) return;
    chart.dataset.follows = "zoom";
    chart.on("plotly_click", ({ points }) => page.showMoment(points.at(-1).x));
    chart.on("plotly_relayout", (change) => {
      if (change["xaxis.autorange"]) view = [0, line.coded.length];
      else if (change["xaxis.range[0]"] !== undefined) view = [change["xaxis.range[0]"], change["xaxis.range[1]"]];
      else if (change["xaxis.range"]) view = change["xaxis.range"];
      else return;
      draw();
    });
  });
})();
