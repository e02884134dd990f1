// The table of buffers: searched and sorted whole, shown a page at a time, so that thousands are quick.
"use strict";
(function () {
  const PAGE = 25;
  const { texts, numbers, buffer_row, detail } = page.data.buffers;
  const COLUMNS = [["buffer", "title", ""], ...buffer_row];
  const CLASSES = { title: "wide", layer: "wide", shape: "mono" };
  const table = page.one("buffers").querySelector("table");
  const search = page.one("buffers-search");
  const kind = page.one("buffers-kind");
  const all = page.one("buffers-all");
  let rows = [];
  let found = [];
  let first = 0;
  let order = null;
  let columns = COLUMNS;
  let shown = null;

  COLUMNS.forEach(([name, field, doc]) => {
    const heading = page.element("th", { scope: "col", class: numbers.includes(field) ? "number" : "", title: doc }, name);
    table.tHead.rows[0].append(heading);
    page.sortable(heading, (direction) => {
      order = [field, direction];
      find();
    });
  });

  function load(report) {
    rows = page.buffersOf(report);
    page.selected = null;
    const kinds = [...new Set(rows.map((row) => row.kind))].sort();
    kind.replaceChildren(new Option("all", ""), ...kinds.map((name) => new Option(page.label(name), name)));
    all.parentNode.hidden = report.at_peak === rows.length;
    // A column in which nobody has anything is left out.
    columns = COLUMNS.filter(([, field]) => field === "start" || rows.some((row) => row[field]));
    COLUMNS.forEach((column, i) => (table.tHead.rows[0].cells[i].hidden = !columns.includes(column)));
  }

  // All words must be somewhere in the row.
  function matches(row, words) {
    row.text ??= [page.label(row.kind), page.codeAt(page.report, row.source, row.source_file), ...texts.map((field) => row[field])].join("\n").toLowerCase();
    return words.every((word) => row.text.includes(word));
  }

  function find() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    found = rows.filter((row) => (all.checked || row.at_peak) && (!kind.value || row.kind === kind.value) && matches(row, words));
    if (order) found.sort((a, b) => page.compare(a[order[0]], b[order[0]], order[1]));
    first = 0;
    show();
  }

  // Shows a buffer with all that is known of it, whatever was searched for; marks it here and on the map.
  page.select = function (index) {
    page.selected = index;
    all.checked ||= !rows[index].at_peak;
    if (!found.includes(rows[index])) {
      search.value = "";
      kind.value = "";
      find();
    }
    if (!found.includes(rows[index])) find();
    first = PAGE * Math.floor(found.indexOf(rows[index]) / PAGE);
    show();
    const button = table.querySelector("tr[aria-current=true] button");
    if (button.getAttribute("aria-expanded") === "false") expand(button, rows[index]);
    button.focus({ preventScroll: true });
    button.closest("tr").scrollIntoView({ block: "center" });
    return page.drawMap();
  };

  // In the column that the colours are of: a colouring has its field's name.
  function swatch(row, field) {
    const grouping = page.grouping(page.report);
    return grouping.name === field ? [page.swatch(grouping.css(grouping.of(row)))] : [];
  }

  function cell(row, [, field]) {
    const td = page.element("td", { class: numbers.includes(field) ? "number" : CLASSES[field] ?? "", "data-field": field });
    if (field === "title") {
      const button = page.element("button", { type: "button", "aria-expanded": "false" }, row.title);
      button.addEventListener("click", () => expand(button, row));
      td.append(button);
    } else if (field === "layer") {
      td.append(...swatch(row, field), ...row.layer.split(/(?<=\/)/).flatMap((part) => [part, document.createElement("wbr")]));
    } else if (field === "kind") {
      td.append(...swatch(row, field), page.label(row.kind));
    } else if (field === "phase") {
      td.append(...swatch(row, field), row.phase);
    } else if (field === "source") {
      td.append(row.source, page.element("code", {}, page.codeAt(page.report, row.source, row.source_file)));
    } else if (field === "start") td.append(`${row.start}–${row.end}`);
    else if (field === "padding_bytes") td.append(row.padding_bytes ? page.bytes(row.padding_bytes) : "");
    else td.append(field.endsWith("_bytes") ? page.bytes(row[field]) : row[field]);
    return td;
  }

  function mark(tr, row) {
    table.querySelector("tr[aria-current=true]")?.removeAttribute("aria-current");
    tr.setAttribute("aria-current", "true");
    page.selected = row.index;
    page.drawMap();
  }

  function expand(button, row) {
    const tr = button.closest("tr");
    const open = button.getAttribute("aria-expanded") === "true";
    button.setAttribute("aria-expanded", String(!open));
    if (open) return tr.nextSibling.remove();
    if (page.selected !== row.index) mark(tr, row);
    const list = page.element("dl");
    for (const [name, field, doc] of detail) {
      if (row[field]) list.append(page.element("dt", { title: doc }, name), page.element("dd", { class: "mono" }, row[field]));
    }
    const code = page.codeAt(page.report, row.source, row.source_file);
    if (code) list.append(page.element("dt", {}, row.source), page.element("dd", { class: "mono" }, code));
    list.append(page.element("dt", {}, "lies at"), page.element("dd", {}, `byte ${row.offset_bytes} of allocation ${row.allocation}`));
    tr.after(page.element("tr", { class: "more" }, page.element("td", { colspan: columns.length }, list)));
  }

  function show() {
    const part = found.slice(first, first + PAGE);
    table.tBodies[0].replaceChildren(...part.map((row) => page.element("tr", row.index === page.selected ? { "aria-current": "true" } : {}, ...columns.map((column) => cell(row, column)))));
    const total = found.reduce((sum, row) => sum + row.size_bytes, 0);
    const left = page.report.left_out;
    page.one("buffers-count").textContent =
      (found.length ? `${first + 1}–${first + part.length} of ${found.length}, ${page.bytes(total)} together` : "No buffer matches.") +
      (left.count ? `; ${left.count} smaller ones, ${page.bytes(left.bytes)}, are not in this file` : "");
    page.one("buffers-back").disabled = first === 0;
    page.one("buffers-next").disabled = first + PAGE >= found.length;
  }

  search.addEventListener("input", find);
  kind.addEventListener("change", find);
  all.addEventListener("change", find);
  page.one("buffers-back").addEventListener("click", () => { first -= PAGE; show(); });
  page.one("buffers-next").addEventListener("click", () => { first += PAGE; show(); });

  let colouring = "";
  page.tables.push((report) => {
    const now = page.grouping(report).name;
    if (shown === report && colouring === now) return; // themes follow the style sheet
    colouring = now;
    if (shown === report) return show();
    shown = report;
    load(report);
    find();
  });
})();
