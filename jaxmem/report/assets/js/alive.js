// Which buffers are alive at a position of the schedule, and how many bytes each has for itself. Values that are updated
// in place share addresses; such bytes count once, as in the timeline, so that the shares sum to its height.
"use strict";
(function () {
  const PLACES = ["allocation", "offset_bytes"];

  // In the order of their places; of those that share one, the first has the bytes: what is known better, is newer.
  function ordered(report) {
    const rank = (kind) => (kind === "unattributed" ? 2 : kind === "activations" ? 1 : 0);
    const first = (a, b) => PLACES.map((name) => a[name] - b[name]).find(Boolean) || b.size_bytes - a.size_bytes || rank(a.kind) - rank(b.kind) || b.start - a.start;
    return (report.byPlace ??= page.buffersOf(report).filter((b) => b.memory_space === "device" && b.size_bytes > 0).sort(first));
  }

  // Calls `each(buffer, bytes)` for every buffer that has bytes for itself at a position; returns their sum.
  page.aliveAt = function (report, position, each) {
    let total = 0;
    let allocation = null;
    let reached = 0;
    for (const b of ordered(report)) {
      if (b.start > position || b.end < position) continue;
      if (b.allocation !== allocation) {
        allocation = b.allocation;
        reached = 0;
      }
      const end = b.offset_bytes + b.size_bytes;
      const own = end - Math.max(b.offset_bytes, reached);
      if (own <= 0) continue;
      reached = end;
      total += own;
      each(b, own);
    }
    return total;
  };
})();
