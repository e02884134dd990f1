// By what timeline, map and tables are coloured: the kind of the bytes, the layer, or the phase of the step. One choice
// for all. A grouping says of each buffer to which group it belongs, and of each group its name and its class of colour.
"use strict";
(function () {
  const LAYERS = 9; // with a colour of their own
  const FEW = 4; // so few families are split by number
  const ONE_KIND = 0.75; // of the bytes at the peak
  const choice = page.one("colour");
  const PHASES = [["throughout", "arguments and outputs"], ["forward", "forward"], ["recompute", "recompute"], ["backward", "backward"], ["update", "update"], ["none", "no phase known"]];

  function byKind() {
    const place = new Map(page.data.kinds.map((kind, number) => [kind, number]));
    return { of: (b) => b.kind, rank: (kind) => place.get(kind) ?? place.size, label: page.label, css: page.kindClass };
  }

  function byPhase() {
    const names = new Map(PHASES);
    const order = PHASES.map(([key]) => key);
    return {
      of: (b) => b.phase || (b.op === "parameter" || b.op === "output" ? "throughout" : "none"),
      rank: (key) => order.indexOf(key),
      label: (key) => names.get(key) ?? key,
      css: (key) => `phase-${names.has(key) ? key : "none"}`,
    };
  }

  const area = (b) => b.size_bytes * (b.end - b.start + 1);
  page.family = (layer) => layer.replace(/\d+/g, "*");

  // Layers that differ in their numbers only are one family. A model that has few of them, such as a hundred blocks
  // of two modules, would be one slab again: then the largest family is split into runs of neighbours.
  function layerGroups(buffers) {
    const families = new Map(); // name → layer → area on the map
    for (const b of buffers) {
      if (!b.layer) continue;
      const name = page.family(b.layer);
      if (!families.has(name)) families.set(name, new Map());
      families.get(name).set(b.layer, (families.get(name).get(b.layer) ?? 0) + area(b));
    }
    const sum = (members) => members.reduce((all, [, size]) => all + size, 0);
    const names = new Intl.Collator("en", { numeric: true });
    let groups = [...families.values()].map((members) => [...members].sort(([a], [b]) => names.compare(a, b)));
    if (groups.length <= FEW) {
      while (groups.length < LAYERS) {
        const largest = groups.filter((members) => members.length > 1).sort((a, b) => sum(b) - sum(a))[0];
        if (!largest) break;
        const half = largest.length >> 1;
        groups = groups.flatMap((members) => (members === largest ? [members.slice(0, half), members.slice(half)] : [members]));
      }
    }
    return groups.map((members) => ({ members: members.map(([layer]) => layer), size: sum(members) })).sort((a, b) => b.size - a.size);
  }

  function named(members) {
    const first = members[0];
    if (members.length === 1) return first;
    const numbers = members.map((layer) => layer.match(/\d+/g));
    const alike = (at) => numbers.every((other) => other[at] === numbers[0][at]);
    let at = -1;
    let ranges = 0;
    return first.replace(/\d+/g, (digits) => {
      at += 1;
      if (alike(at)) return digits;
      ranges += 1;
      return ranges === 1 ? `${digits}–${numbers.at(-1)[at]}` : "*";
    });
  }

  function byLayer(buffers) {
    const groups = layerGroups(buffers);
    const number = new Map(groups.flatMap(({ members }, i) => members.map((layer) => [layer, i < LAYERS ? String(i) : "other"])));
    const rest = groups.length - LAYERS;
    const labels = new Map([...groups.slice(0, LAYERS).map(({ members }, i) => [String(i), named(members)]), ["other", `${rest} smaller ${rest === 1 ? "layer" : "layers"}`], ["none", "outside any layer"]]);
    const order = [...labels.keys()];
    const layerOf = (layer) => (layer ? number.get(layer) ?? "other" : "none");
    return { of: (b) => layerOf(b.layer), rank: (key) => order.indexOf(key), label: (key) => labels.get(key), css: (key) => `layer-${key}` };
  }

  // The grouping that is chosen now, for a report.
  page.grouping = function (report) {
    report.groupings ??= {};
    return (report.groupings[choice.value] ??= { name: choice.value, ...{ kind: byKind, layer: byLayer, phase: byPhase }[choice.value](page.buffersOf(report)) });
  };

  page.groupColour = (grouping, key) => page.colour("--kind", grouping.css(key));
  page.swatch = (name) => page.element("span", { class: `swatch ${name}` });

  // A chart's legend: groups by their keys, in the grouping's order.
  page.legend = function (section, grouping, keys) {
    const items = [...keys].sort((a, b) => grouping.rank(a) - grouping.rank(b)).map((key) => page.element("li", {}, page.swatch(grouping.css(key)), grouping.label(key)));
    page.one(section).querySelector(".legend").replaceChildren(...items);
  };

  choice.addEventListener("change", () => page.redraw());

  // Where nearly all bytes are of one kind, kinds would tell nothing: then the layers are shown first.
  page.chooseColours = function (report) {
    const sizes = new Map();
    for (const [, kind, size] of report.layers) sizes.set(kind, (sizes.get(kind) ?? 0) + size);
    const all = [...sizes.values()].reduce((sum, size) => sum + size, 0);
    const layers = new Set(report.layers.map(([layer]) => layer)).size;
    choice.value = layers >= FEW && Math.max(...sizes.values()) > ONE_KIND * all ? "layer" : "kind";
  };
})();
