// Forward and backward as a strip below a chart over the schedule.
"use strict";
(function () {
  const HEIGHT = 0.05; // of the chart
  const SHORTEST = 0.006; // of the schedule; shorter runs belong to the one before them

  // [phase, from, to), without those that are too short to be seen.
  function runs({ phases, length }) {
    const kept = [];
    for (const [phase, from, to] of phases) {
      const last = kept.at(-1);
      if (last && (to - from < SHORTEST * length || last[0] === phase)) last[2] = to;
      else kept.push([phase, from, to]);
    }
    return kept;
  }

  // Shapes and annotations of the strip, and the domain that it leaves to the chart.
  page.phaseStrip = function (report, from, to, width) {
    const found = report.timeline ? (report.phaseRuns ??= runs(report.timeline)) : [];
    if (!found.length) return { shapes: [], annotations: [], xaxis: {}, yaxis: {} };
    const shapes = [];
    const annotations = [];
    for (const [phase, start, end] of found) {
      const [left, right] = [Math.max(start, from), Math.min(end, to)];
      if (right <= left) continue;
      const colour = page.colour("--kind", `phase-${phase}`);
      shapes.push({ type: "rect", name: phase, xref: "x", yref: "paper", x0: left, x1: right, y0: 0, y1: HEIGHT, line: { width: 0 }, fillcolor: colour });
      if (((right - left) / (to - from)) * width < 7 * phase.length) continue;
      annotations.push({ xref: "x", yref: "paper", x: (left + right) / 2, y: HEIGHT / 2, yanchor: "middle", showarrow: false, text: phase, font: { size: 11, color: page.readable(colour) } });
    }
    return { shapes, annotations, xaxis: { anchor: "free", position: 0 }, yaxis: { domain: [HEIGHT + 0.012, 1] } };
  };
})();
