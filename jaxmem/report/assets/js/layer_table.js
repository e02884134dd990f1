// The layers as a table: bytes at the peak by kind. Repeated layers are one row with their sum, which opens.
"use strict";
(function () {
  const table = page.one("layers").querySelector("table");
  const head = table.tHead.rows[0];
  const SHARE = 0.005; // of all; kinds that have less are one column
  const OTHERS = "others";
  let order = ["total", -1];
  let open = new Set(); // names of families
  let found = { families: [], kinds: [], sums: new Map(), total: 0 };

  const add = (sums, kind, size) => sums.set(kind, (sums.get(kind) ?? 0) + size);

  // Families of layers that differ in their numbers only, each with its members.
  function gather(report) {
    const families = new Map();
    const sums = new Map();
    let total = 0;
    for (const [code, kind, size] of report.layers) {
      const layer = report.strings[code];
      const name = page.family(layer);
      if (!families.has(name)) families.set(name, { name, sums: new Map(), total: 0, members: new Map() });
      const family = families.get(name);
      if (!family.members.has(layer)) family.members.set(layer, { name: layer, sums: new Map(), total: 0 });
      for (const one of [family, family.members.get(layer)]) {
        add(one.sums, kind, size);
        one.total += size;
      }
      add(sums, kind, size);
      total += size;
    }
    const every = [...families.values()].flatMap((family) => [family, ...family.members.values()]);
    const small = [...sums].filter(([, size]) => size < SHARE * total).map(([kind]) => kind);
    for (const of of [sums, ...every.map((one) => one.sums)]) {
      for (const kind of small) {
        if (of.has(kind)) add(of, OTHERS, of.get(kind));
        of.delete(kind);
      }
    }
    const rank = new Map([...page.data.kinds, OTHERS].map((kind, number) => [kind, number]));
    const kinds = [...sums.keys()].sort((a, b) => (rank.get(a) ?? 99) - (rank.get(b) ?? 99));
    return { families: [...families.values()].map((f) => (f.members.size > 1 ? f : [...f.members.values()][0])), kinds, sums, total };
  }

  const value = (one, field) => (field === "name" ? one.name : field === "total" ? one.total : one.sums.get(field) ?? null);
  const sorted = (rows) => [...rows].sort((a, b) => page.compare(value(a, order[0]), value(b, order[0]), order[1]));

  function row(one, className) {
    const heading = page.element("th", { scope: "row" });
    const grouping = page.grouping(page.report);
    const name = one.name || "outside any layer";
    if (grouping.name === "layer" && !one.members && one.sums.size && className !== "sum") heading.append(page.swatch(grouping.css(grouping.of({ layer: one.name }))));
    if (one.members) {
      const button = page.element("button", { type: "button", "aria-expanded": String(open.has(one.name)) }, `${name} (${one.members.size})`);
      button.addEventListener("click", () => {
        open.has(one.name) ? open.delete(one.name) : open.add(one.name);
        show();
        [...table.querySelectorAll("th button[aria-expanded]")].find((other) => other.textContent === button.textContent)?.focus();
      });
      heading.append(button);
    } else heading.append(name);
    const cells = [one.total, ...found.kinds.map((kind) => one.sums.get(kind))];
    const share = page.element("td", { class: "number" }, page.share(Math.max(one.total, 0), page.report.peak_bytes ?? found.total));
    const numbers = cells.map((size) => page.element("td", { class: "number" }, size ? page.bytes(size) : ""));
    return page.element("tr", { class: className }, heading, numbers[0], share, ...numbers.slice(1));
  }

  function show() {
    const rows = sorted(found.families).flatMap((family) => [
      row(family, ""),
      ...(family.members && open.has(family.name) ? sorted(family.members.values()).map((one) => row(one, "member")) : []),
    ]);
    // The compiler's peak has bytes between buffers too, and counts those once that two buffers share.
    const peak = page.report.peak_bytes ?? found.total;
    const rest = peak - found.total;
    if (rest) rows.push(row({ name: rest > 0 ? "in no buffer: fragmentation, code" : "shared by two buffers", sums: new Map(), total: rest }, ""));
    table.tBodies[0].replaceChildren(...rows, row({ name: "peak", sums: found.sums, total: peak }, "sum"));
  }

  function headings() {
    const columns = [["layer", "name", ""], ["bytes", "total", "number"], ["share", null, "number"], ...found.kinds.map((kind) => [page.label(kind), kind, "number"])];
    head.replaceChildren();
    for (const [name, field, className] of columns) {
      const heading = page.element("th", { scope: "col", class: className }, name);
      if (found.kinds.includes(field) && field !== OTHERS) heading.prepend(page.swatch(page.kindClass(field)));
      head.append(heading);
      if (field) page.sortable(heading, (direction) => { order = [field, direction]; show(); });
    }
    head.cells[1].setAttribute("aria-sort", "descending");
    order = ["total", -1];
  }

  let shown = null;
  page.tables.push((report) => {
    table.parentNode.hidden = report.layers.length === 0;
    if (shown !== report) {
      shown = report;
      open = new Set();
      found = gather(report);
      headings();
    }
    show();
  });
})();
