// What all scripts of the page share: the data, units, names made safe for plotly, colours.
"use strict";

const page = {
  data: JSON.parse(document.getElementById("data").textContent),
  // Called with the chosen report: at first, when another is chosen, when the theme changes. Charts need plotly.
  tables: [],
  charts: [],
  one: (id) => document.getElementById(id),
};

page.bytes = function (value) {
  if (value === null || value === undefined) return "–";
  for (const [unit, size, digits] of [["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1]]) {
    if (Math.abs(value) >= size) return `${(value / size).toFixed(digits)} ${unit}`;
  }
  return `${value} B`;
};

// The unit in which an axis up to `most` bytes is read.
page.unit = function (most) {
  for (const [name, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (most >= size) return { name, size };
  }
  return { name: "B", size: 1 };
};

page.flops = function (value) {
  for (const [unit, size] of [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["K", 1e3]]) {
    if (Math.abs(value) >= size) return `${(value / size).toFixed(2)} ${unit}FLOP`;
  }
  return `${value} FLOP`;
};

page.label = (kind) => kind.replaceAll("_", " ");

page.element = function (tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
};

// Plotly reads a few tags and entities in its texts; names of the program are plain text.
page.plain = (text) => String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

// Lines of a hover label: long names are folded, since plotly does not, and what is empty is left out.
page.hover = function (lines) {
  const folded = [];
  for (const line of lines) {
    if (!line) continue;
    const text = line.length > 240 ? `${line.slice(0, 239)}…` : line;
    for (let i = 0; i < text.length; i += 48) folded.push(page.plain(text.slice(i, i + 48)));
  }
  return folded.join("<br>");
};

// A column of a report's buffers; one value stands for all where they are alike.
page.column = function (buffers, name) {
  const values = buffers[name];
  return Array.isArray(values) ? (i) => values[i] : () => values;
};

// Reads buffer `i` of a report as an object.
page.reader = function (report) {
  const { texts, numbers } = page.data.buffers;
  const columns = new Map([...texts, ...numbers].map((name) => [name, page.column(report.buffers, name)]));
  return function (i) {
    const buffer = { index: i, at_peak: i < report.at_peak };
    for (const name of texts) buffer[name] = report.strings[columns.get(name)(i)];
    for (const name of numbers) buffer[name] = columns.get(name)(i);
    return buffer;
  };
};

page.describe = (buffer) => [
  `${page.bytes(buffer.size_bytes)} ${page.label(buffer.kind)}`,
  buffer.layer || buffer.path,
  [buffer.saved_name, buffer.op, buffer.phase].filter(Boolean).join(" · "),
  buffer.shape,
  buffer.source,
];

// Shows a chart, or why there is none.
page.shows = function (section, there) {
  page.one(section).querySelector("[data-none]").hidden = there;
  page.one(`${section}-chart`).hidden = !there;
  if (!there) page.one(section).querySelector(".legend").replaceChildren();
  return there;
};

page.legend = function (section, kinds) {
  const items = kinds.map((kind) => page.element("li", {}, page.element("span", { class: `swatch ${page.kindClass(kind)}` }), page.label(kind)));
  page.one(section).querySelector(".legend").replaceChildren(...items);
};
