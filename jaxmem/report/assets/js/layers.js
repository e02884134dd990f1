// Layers as an icicle or a treemap: paths split at "/", and below each layer its groups: kinds, or phases.
"use strict";
(function () {
  const SMALLEST = 0.0005; // of the whole; what is smaller is drawn as one
  const ALIKE = 4; // so many siblings that differ in their number only are drawn as one, where asked

  function node(name, id) {
    return { name, id, children: new Map(), groups: new Map(), total: 0 };
  }

  // "block_7" → "block_#", where enough siblings are called so.
  function families(rows) {
    const siblings = new Map(); // family's path → the names in it
    for (const parts of rows) {
      let path = "";
      for (const part of parts) {
        const family = `${path}/${part.replace(/\d+/g, "#")}`;
        if (!siblings.has(family)) siblings.set(family, new Set());
        siblings.get(family).add(part);
        path = family;
      }
    }
    return siblings;
  }

  // [layer, group, bytes at the peak].
  function rowsOf(report, grouping) {
    if (grouping.name === "phase") return page.buffersOf(report).filter((b) => b.at_peak).map((b) => [b.layer, grouping.of(b), b.size_bytes]);
    return report.layers.map(([code, kind, size]) => [report.strings[code], grouping.of({ kind, layer: report.strings[code] }), size]);
  }

  function tree(name, sizes, together) {
    const root = node(name, "");
    const rows = sizes.map(([layer]) => (layer ? layer.split("/") : ["outside any layer"]));
    const siblings = families(rows);
    sizes.forEach(([, group, size], index) => {
      let at = root;
      let family = "";
      at.total += size;
      for (const part of rows[index]) {
        family += `/${part.replace(/\d+/g, "#")}`;
        const count = siblings.get(family).size;
        const merged = together && count >= ALIKE && /\d/.test(part);
        const key = merged ? `${part.replace(/\d+/g, "#")}\u0000` : part;
        const name = merged ? `${part.replace(/\d+/g, "*")} (${count})` : part;
        if (!at.children.has(key)) at.children.set(key, node(name, `${at.id}/${merged ? part.replace(/\d+/g, "*") : part}`));
        at = at.children.get(key);
        at.total += size;
      }
      at.groups.set(group, (at.groups.get(group) ?? 0) + size);
    });
    // A column each for what holds all the rest would say nothing.
    let top = root;
    while (top.children.size === 1 && top.groups.size === 0) {
      const [only] = top.children.values();
      only.name = `${top.name} / ${only.name}`;
      top = only;
    }
    return top;
  }

  // One entry a rectangle; the largest first, and the many smallest of a layer together.
  function flatten(root, grouping) {
    const out = [];
    // Returns the bytes of each group in a node and below.
    (function visit(at, parent) {
      const id = at.id || "/";
      const only = at.children.size === 0 && at.groups.size === 1 ? [...at.groups.keys()][0] : "";
      const entry = { id, parent, name: at.name, total: at.total, group: only, most: only, path: at.id.slice(1) };
      const sums = new Map(at.groups);
      out.push(entry);
      if (!only) {
        for (const [group, size] of at.groups) {
          const name = grouping.label(group);
          out.push({ id: `${id}\u0000${group}`, parent: id, name: name === entry.path ? "in itself" : name, total: size, group, most: group, path: entry.path });
        }
      }
      const few = { total: 0, count: 0 };
      for (const child of [...at.children.values()].sort((a, b) => b.total - a.total)) {
        if (child.total < SMALLEST * root.total) {
          few.total += child.total;
          few.count += 1;
          continue;
        }
        for (const [group, size] of visit(child, id)) sums.set(group, (sums.get(group) ?? 0) + size);
      }
      if (few.total > 0) out.push({ id: `${id}\u0000few`, parent: id, name: `${few.count} smaller`, total: few.total, group: "", most: "", path: entry.path });
      entry.most = [...sums].reduce((a, b) => (b[1] > a[1] ? b : a), ["", 0])[0];
      return sums;
    })(root, "");
    return out;
  }

  // A layer that holds others has a pale shade of the group that it holds most of.
  function mixed(colour, ground, share) {
    const [a, b] = [colour, ground].map((text) => text.match(/[\d.]+/g).map(Number));
    return `rgb(${[0, 1, 2].map((i) => Math.round(a[i] * share + b[i] * (1 - share))).join(",")})`;
  }

  const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

  function draw(report) {
    if (!page.shows("layers", report.layers.length > 0)) return;
    const grouping = page.grouping(report);
    const rows = rowsOf(report, grouping);
    const entries = flatten(tree(report.name, rows, page.one("layers-together").checked), grouping);
    const shape = page.one("layers-shape").value;
    const groups = [...new Set(rows.map((row) => row[1]))];
    const colours = new Map(groups.map((group) => [group, page.groupColour(grouping, group)]));
    const ground = page.colour("--surface");
    const total = entries[0].total || 1;
    const narrow = page.one("layers-chart").clientWidth < 600;
    const colourOf = entries.map((entry) => colours.get(entry.group) ?? mixed(colours.get(entry.most) ?? page.colour("--sunken"), ground, 0.3));
    const trace = {
      type: shape,
      ids: entries.map((entry) => entry.id),
      parents: entries.map((entry) => entry.parent),
      labels: entries.map((entry) => `${page.plain(short(entry.name, narrow ? 14 : 60))}${narrow ? "<br>" : "  "}${page.bytes(entry.total)}`),
      values: entries.map((entry) => entry.total),
      branchvalues: "total",
      sort: false,
      textinfo: "label",
      hovertext: entries.map((entry) =>
        page.hover([entry.path || entry.name, entry.group && grouping.label(entry.group), `${page.bytes(entry.total)}, ${page.share(entry.total, total)}`])),
      hovertemplate: "%{hovertext}<extra></extra>",
      marker: { colors: colourOf, line: { width: 0.5, color: ground } },
      leaf: { opacity: 1 },
      textfont: { color: colourOf.map(page.readable) },
      pathbar: { thickness: 22, textfont: { size: 12 } },
      maxdepth: narrow ? 3 : 5,
      tiling: shape === "treemap" ? { pad: 1 } : { pad: 0, orientation: "h" },
    };
    if (shape === "treemap") trace.marker.pad = { t: 20, l: 2, r: 2, b: 2 };
    const layout = page.layout({ margin: { l: 0, r: 0, t: 4, b: 4 }, uniformtext: { minsize: 10, mode: "hide" } });
    page.legend("layers", grouping, groups);
    return Plotly.react("layers-chart", [trace], layout, { ...page.config, modeBarButtons: [["toImage"]] });
  }
  page.charts.push(draw);
  for (const id of ["layers-shape", "layers-together"]) page.one(id).addEventListener("change", () => draw(page.report));
})();
