// What is alive at a moment of the timeline: chosen by a click on the chart, or by its position.
"use strict";
(function () {
  const MOST = 12;
  const at = page.one("alive-at");
  const said = page.one("alive-said");
  const table = page.one("alive").querySelector("table");

  function row(b, own) {
    const name = page.element("button", { type: "button", title: "Show in the table of buffers" }, b.title);
    name.addEventListener("click", () => page.select(b.index));
    const grouping = page.grouping(page.report);
    const code = page.codeAt(page.report, b.source, b.source_file);
    return page.element("tr", {},
      page.element("th", { scope: "row" }, page.swatch(grouping.css(grouping.of(b))), name),
      page.element("td", { class: "number" }, page.bytes(own)),
      page.element("td", {}, page.label(b.kind)),
      page.element("td", { class: "wide" }, b.layer),
      page.element("td", {}, b.op),
      page.element("td", { class: "code" }, b.source, page.element("code", {}, code)));
  }

  function list(position) {
    const report = page.report;
    const moment = page.momentAt(position);
    const alive = [];
    const known = page.aliveAt(report, moment.position, (b, own) => alive.push([b, own]));
    alive.sort(([, a], [, b]) => b - a);
    const shown = alive.slice(0, MOST);
    const rest = alive.slice(MOST).reduce((sum, [, own]) => sum + own, 0) + Math.max(0, moment.total - known);
    const more = alive.length - shown.length;
    const where = [moment.text("phase"), moment.text("layer"), moment.text("op"), moment.text("source")].filter(Boolean).join(" · ");
    said.textContent = `${page.bytes(moment.total)} alive at ${moment.position}${where ? `, while this runs: ${where}` : ""}`;
    const rows = shown.map(([b, own]) => row(b, own));
    const cells = (name, size) => page.element("tr", { class: "sum" }, page.element("th", { scope: "row" }, name), page.element("td", { class: "number" }, page.bytes(size)), page.element("td", { colspan: 4 }));
    if (rest > 0) rows.push(cells(moment.total > known ? `and more than ${more} smaller` : `and ${more} smaller`, rest));
    table.tBodies[0].replaceChildren(...rows, cells("together", moment.total));
    table.parentNode.hidden = false;
    at.value = moment.position;
  }

  function clear() {
    page.position = null;
    said.textContent = "";
    table.parentNode.hidden = true;
  }

  page.showMoment = function (position) {
    page.position = page.momentAt(Math.min(Math.max(Math.round(position) || 0, 0), page.report.timeline.length - 1)).position;
    list(page.position);
    return page.drawTimeline();
  };

  at.addEventListener("change", () => (at.value === "" ? (clear(), page.drawTimeline()) : page.showMoment(Number(at.value))));
  page.one("alive-peak").addEventListener("click", () => page.showMoment(page.report.timeline.peak_position));

  let shown = null;
  page.charts.push((report) => {
    page.one("alive").hidden = !report.timeline?.positions.length;
    if (shown !== report) clear();
    else if (page.position !== null) list(page.position); // colours may be others now
    shown = report;
    at.max = Math.max(0, (report.timeline?.length ?? 1) - 1);
  });
})();
