// What all scripts of the page share: the data, names made safe for plotly, buffers read.
"use strict";

const page = {
  data: JSON.parse(document.getElementById("data").textContent),
  // Called with the chosen report: at first, when another is chosen, when the theme changes. Charts need plotly.
  tables: [],
  charts: [],
  one: (id) => document.getElementById(id),
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
    buffer.title = buffer.path || buffer.saved_name || buffer.name;
    return buffer;
  };
};

// All buffers of a report as objects, made once.
page.buffersOf = function (report) {
  if (!report.read) {
    const read = page.reader(report);
    report.read = Array.from({ length: report.buffers.count }, (_, i) => read(i));
  }
  return report.read;
};

// What stands at a line of the user's code: of "gpt.py:52" and its file, or of the former alone where no two files
// of that name have such a line.
page.codeAt = function (report, source, file = "") {
  if (!report.code) {
    report.code = new Map();
    for (const [path, line, text] of report.lines) {
      const name = `${report.strings[path].split(/[\\/]/).at(-1)}:${line}`;
      report.code.set(`${report.strings[path]}\u0000${line}`, report.strings[text]); // a cell is called In[3]
      report.code.set(name, report.code.has(name) ? "" : report.strings[text]);
    }
  }
  return report.code.get(file ? `${file}\u0000${source.split(":").at(-1)}` : source) ?? "";
};

page.describe = (buffer) => [
  `${page.bytes(buffer.size_bytes)} ${page.label(buffer.kind)}`,
  buffer.layer || buffer.path,
  [buffer.saved_name, buffer.op, buffer.phase].filter(Boolean).join(" · "),
  buffer.shape,
  buffer.source,
  page.codeAt(page.report, buffer.source, buffer.source_file),
];

// Shows a chart, or why there is none.
page.shows = function (section, there) {
  page.one(section).querySelector("[data-none]").hidden = there;
  page.one(`${section}-chart`).hidden = !there;
  if (!there) page.one(section).querySelector(".legend").replaceChildren();
  return there;
};
