// Forward and backward as a strip below a chart over the schedule: runs of moments of one phase of the step.
"use strict";
(function () {
  const HEIGHT = 0.05; // of the chart
  const SHORTEST = 0.006; // of the schedule; shorter runs belong to the one before them

  // [phase, from, to): what has no phase of its own, such as a copy, belongs to the run that it stands in.
  function runs(report) {
    const { phase, positions, length } = report.timeline;
    const found = [];
    phase.forEach((code, i) => {
      const name = report.strings[code];
      const end = positions[i + 1] ?? length;
      const last = found.at(-1);
      if (last && (!name || last[0] === name)) last[2] = end;
      else if (name) found.push([name, found.length ? positions[i] : 0, end]);
    });
    const kept = [];
    for (const run of found) {
      const last = kept.at(-1);
      if (last && (run[2] - run[1] < SHORTEST * length || last[0] === run[0])) last[2] = run[2];
      else kept.push([...run]);
    }
    return kept;
  }

  // Shapes and annotations of the strip, and the domain that it leaves to the chart.
  page.phaseStrip = function (report, from, to, width) {
    const found = report.timeline?.phase ? (report.phaseRuns ??= runs(report)) : [];
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
