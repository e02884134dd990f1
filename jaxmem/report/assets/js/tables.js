// Sorting by a column's heading, with mouse or keyboard, for the tables that the page was written with.
"use strict";
(function () {
  page.sortable = function (heading, onSort) {
    const button = page.element("button", { type: "button" }, ...heading.childNodes);
    heading.replaceChildren(button);
    heading.setAttribute("aria-sort", "none");
    button.addEventListener("click", () => {
      // Numbers begin with the largest.
      const first = heading.classList.contains("number") ? "descending" : "ascending";
      const other = first === "descending" ? "ascending" : "descending";
      const now = heading.getAttribute("aria-sort") === first ? other : first;
      for (const sibling of heading.parentNode.children) {
        if (sibling.hasAttribute("aria-sort")) sibling.setAttribute("aria-sort", "none");
      }
      heading.setAttribute("aria-sort", now);
      onSort(now === "ascending" ? 1 : -1);
    });
  };

  const names = new Intl.Collator(undefined, { numeric: true });
  // What is unknown stays last, whichever way.
  page.compare = function (a, b, direction) {
    const missing = (value) => value === "" || value === null || value === undefined;
    if (missing(a) || missing(b)) return missing(a) - missing(b);
    return direction * (typeof a === "number" ? a - b : names.compare(a, b));
  };

  function value(row, column) {
    const cell = row.children[column];
    if (!("value" in cell.dataset)) return cell.textContent.trim();
    return cell.dataset.value === "" ? null : Number(cell.dataset.value);
  }

  for (const table of document.querySelectorAll("table[data-sortable]")) {
    const body = table.tBodies[0];
    [...table.tHead.rows[0].cells].forEach((heading, column) => {
      if (heading.hasAttribute("aria-hidden")) return;
      page.sortable(heading, (direction) => {
        const rows = [...body.rows];
        rows.sort((a, b) => page.compare(value(a, column), value(b, column), direction));
        body.append(...rows);
        fold();
      });
    });

    // Of a long table the first rows, until asked for all.
    const most = Number(table.dataset.first ?? Infinity);
    let folded = body.rows.length > most;
    const fold = () => [...body.rows].forEach((row, i) => (row.hidden = folded && i >= most));
    fold();
    if (!folded) continue;
    const button = page.element("button", { type: "button" }, `Show all ${body.rows.length}`);
    button.addEventListener("click", () => {
      folded = false;
      fold();
      button.remove();
    });
    table.closest(".scroll").after(button);
  }
})();
