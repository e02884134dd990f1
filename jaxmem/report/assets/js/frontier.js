// Peak bytes against what they cost in computing. The line joins the variants that none beats in both.
"use strict";
(function () {
  const chart = page.one("frontier-chart");
  if (!chart) return;
  const price = page.one("price");
  const has = (field) => page.data.frontier.filter((point) => point.peak_bytes !== null && point[field] !== null).length > 1;
  for (const option of [...price.options]) if (!has(option.value)) option.remove();
  if (price.options.length === 0) page.one("frontier").hidden = true;
  if (price.options.length === 1) price.closest(".controls").hidden = true;

  page.charts.push(draw);
  price.addEventListener("change", draw);
  function draw() {
    const field = price.value;
    if (!field) return;
    const points = page.data.frontier.filter((point) => point.peak_bytes !== null && point[field] !== null);
    const unit = page.unit(Math.max(...points.map((point) => point.peak_bytes)));
    const beaten = (p) => points.some((q) => q[field] <= p[field] && q.peak_bytes <= p.peak_bytes && (q[field] < p[field] || q.peak_bytes < p.peak_bytes));
    const best = points.filter((point) => !beaten(point)).sort((a, b) => a[field] - b[field] || b.peak_bytes - a.peak_bytes);
    const cost = (point) => point.texts[field];
    const scale = field === "step_seconds" ? 1e3 : 1;
    const x = (point) => point[field] * scale;
    const colours = { yes: page.colour("--good"), no: page.colour("--bad"), uncertain: page.colour("--unsure") };
    const symbols = { yes: "circle", no: "x", uncertain: "diamond" };
    const named = points.length <= 12 ? points : best;
    const traces = [
      { type: "scatter", mode: "lines", x: best.map(x), y: best.map((p) => p.peak_bytes / unit.size), line: { color: page.colour("--muted"), width: 1.5, dash: "dot" }, hoverinfo: "skip" },
      {
        type: "scatter",
        mode: "markers+text",
        x: points.map(x),
        y: points.map((p) => p.peak_bytes / unit.size),
        text: points.map((p) => (named.includes(p) ? page.plain(p.name.length > 24 ? `${p.name.slice(0, 23)}…` : p.name) : "")),
        textposition: points.map((p) => place(p, points, field)),
        textfont: { color: page.colour("--text"), size: 12 },
        cliponaxis: false,
        marker: { size: 11, color: points.map((p) => colours[p.fits]), symbol: points.map((p) => symbols[p.fits]) },
        hovertext: points.map((p) => page.hover([p.name, `peak ${page.bytes(p.peak_bytes)}`, cost(p), `fits: ${p.fits}`])),
        hovertemplate: "%{hovertext}<extra></extra>",
      },
    ];
    const capacity = page.data.reports[0].capacity_bytes;
    const top = Math.max(...points.map((p) => p.peak_bytes));
    const near = capacity && capacity < 2.5 * top;
    const red = page.colour("--bad");
    const layout = page.layout({
      shapes: near ? [{ type: "line", xref: "paper", x0: 0, x1: 1, y0: capacity / unit.size, y1: capacity / unit.size, line: { color: red, width: 1.5, dash: "dash" } }] : [],
      annotations: near ? [{ xref: "paper", x: 1, xanchor: "right", y: capacity / unit.size, yanchor: "bottom", showarrow: false, text: `capacity ${page.bytes(capacity)}`, font: { color: red, size: 12 } }] : [],
      hovermode: "closest",
      margin: { l: 64, r: 48, t: 28, b: 48 },
      xaxis: { title: { text: field === "step_seconds" ? "step time, ms (estimate)" : "recomputed FLOPs" }, rangemode: "tozero", exponentformat: "SI" },
      yaxis: { title: { text: "peak" }, automargin: true, ticksuffix: ` ${unit.name}`, range: [0, (1.12 * Math.max(top, near ? capacity : 0)) / unit.size] },
    });
    return Plotly.react(chart, traces, layout, page.config);
  }

  // Names stand above their point; below where another point is close above, inwards at the right edge.
  function place(point, points, field) {
    const most = [Math.max(...points.map((p) => p[field]), 1e-30), Math.max(...points.map((p) => p.peak_bytes), 1)];
    const close = points.some((p) => p !== point && Math.abs(p[field] - point[field]) < 0.15 * most[0] && p.peak_bytes >= point.peak_bytes && p.peak_bytes - point.peak_bytes < 0.12 * most[1]);
    const side = point[field] > 0.9 * most[0] ? " left" : point[field] < 0.05 * most[0] ? " right" : " center";
    return (close ? "bottom" : "top") + side;
  }
})();
