// Layers as an icicle or a treemap: paths split at "/", and below each layer its kinds.
"use strict";
(function () {
  const SMALLEST = 0.0005; // of the whole; what is smaller is drawn as one
  const ALIKE = 4; // so many siblings that differ in their number only are drawn as one, where asked

  function node(name, id) {
    return { name, id, children: new Map(), kinds: new Map(), total: 0, most: "" };
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

  function tree(report, together) {
    const root = node(report.name, "");
    const rows = report.layers.map(([code]) => (report.strings[code] ? report.strings[code].split("/") : ["outside any layer"]));
    const siblings = families(rows);
    report.layers.forEach(([, kind, size], index) => {
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
      at.kinds.set(kind, (at.kinds.get(kind) ?? 0) + size);
    });
    // A column each for what holds all the rest would say nothing.
    let top = root;
    while (top.children.size === 1 && top.kinds.size === 0) {
      const [only] = top.children.values();
      only.name = `${top.name} / ${only.name}`;
      top = only;
    }
    return top;
  }

  // One entry a rectangle; the largest first, and the many smallest of a layer together.
  function flatten(root) {
    const out = [];
    // Returns the bytes of each kind in a node and below.
    (function visit(at, parent, depth) {
      const id = at.id || "/";
      const only = at.children.size === 0 && at.kinds.size === 1 ? [...at.kinds.keys()][0] : "";
      const entry = { id, parent, name: at.name, total: at.total, kind: only, most: only, depth, path: at.id.slice(1) };
      const sums = new Map(at.kinds);
      out.push(entry);
      if (!only) {
        for (const [kind, size] of at.kinds) {
          out.push({ id: `${id}\u0000${kind}`, parent: id, name: page.label(kind), total: size, kind, most: kind, depth: depth + 1, path: entry.path });
        }
      }
      const few = { total: 0, count: 0 };
      for (const child of [...at.children.values()].sort((a, b) => b.total - a.total)) {
        if (child.total < SMALLEST * root.total) {
          few.total += child.total;
          few.count += 1;
          continue;
        }
        for (const [kind, size] of visit(child, id, depth + 1)) sums.set(kind, (sums.get(kind) ?? 0) + size);
      }
      if (few.total > 0) out.push({ id: `${id}\u0000few`, parent: id, name: `${few.count} smaller`, total: few.total, kind: "", most: "", depth: depth + 1, path: entry.path });
      entry.most = [...sums].reduce((a, b) => (b[1] > a[1] ? b : a), ["", 0])[0];
      return sums;
    })(root, "", 0);
    return out;
  }

  // A layer that holds others has a pale shade of the kind that it holds most of.
  function mixed(colour, ground, share) {
    const [a, b] = [colour, ground].map((text) => text.match(/[\d.]+/g).map(Number));
    return `rgb(${[0, 1, 2].map((i) => Math.round(a[i] * share + b[i] * (1 - share))).join(",")})`;
  }

  // Dark on pale and pale on dark, by the luminance that contrast is reckoned from.
  function readable(colour) {
    const hex = colour.startsWith("#") && colour.slice(1).match(/../g).map((pair) => parseInt(pair, 16));
    const parts = hex || colour.match(/[\d.]+/g).map(Number);
    const [r, g, b] = parts.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.18 ? "#0e1319" : "#ffffff";
  }

  const short = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);

  const DEPTHS = ["#37506e", "#4f6f95", "#6c8db3", "#8daacb", "#b0c5dd", "#d0dcea"];

  function draw(report) {
    if (!page.shows("layers", report.layers.length > 0)) return;
    const entries = flatten(tree(report, page.one("layers-together").checked));
    const shape = page.one("layers-shape").value;
    const byKind = page.one("layers-colour").value === "kind";
    const kinds = [...new Set(report.layers.map((row) => row[1]))];
    const colours = new Map(kinds.map((kind) => [kind, page.kindColour(kind)]));
    const ground = page.colour("--surface");
    const total = entries[0].total || 1;
    const narrow = page.one("layers-chart").clientWidth < 600;
    const colour = function (entry) {
      if (!byKind) return DEPTHS[Math.min(entry.depth, DEPTHS.length - 1)];
      return colours.get(entry.kind) ?? mixed(colours.get(entry.most) ?? page.colour("--sunken"), ground, 0.3);
    };
    const colourOf = entries.map(colour);
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
        page.hover([entry.path || entry.name, entry.kind && page.label(entry.kind), `${page.bytes(entry.total)}, ${((100 * entry.total) / total).toFixed(1)} %`])),
      hovertemplate: "%{hovertext}<extra></extra>",
      marker: { colors: colourOf, line: { width: 0.5, color: ground } },
      leaf: { opacity: 1 },
      textfont: { color: colourOf.map(readable) },
      pathbar: { thickness: 22, textfont: { size: 12 } },
      maxdepth: narrow ? 3 : 5,
      tiling: shape === "treemap" ? { pad: 1 } : { pad: 0, orientation: "h" },
    };
    if (shape === "treemap") trace.marker.pad = { t: 20, l: 2, r: 2, b: 2 };
    const layout = page.layout({ margin: { l: 0, r: 0, t: 4, b: 4 }, uniformtext: { minsize: 10, mode: "hide" } });
    page.legend("layers", byKind ? kinds : []);
    return Plotly.react("layers-chart", [trace], layout, { ...page.config, modeBarButtons: [["toImage"]] });
  }
  page.charts.push(draw);
  for (const id of ["layers-shape", "layers-colour", "layers-together"]) page.one(id).addEventListener("change", () => draw(page.report));
})();
