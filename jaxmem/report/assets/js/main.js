// Draws one thing after another, so that the page can be read meanwhile, and again when something changes. Plotly,
// which takes a browser longer than all else here, is run once the page is seen and its tables work.
"use strict";
(function () {
  const which = page.one("which");
  const settled = () => new Promise((resolve) => setTimeout(resolve));
  const loaded = () => typeof Plotly !== "undefined";
  let run = 0;

  page.choose = function () {
    const index = which ? Number(which.value) : 0;
    page.report = page.data.reports[index];
    for (const part of document.querySelectorAll("[data-report]")) part.hidden = Number(part.dataset.report) !== index;
    return page.redraw();
  };

  page.redraw = async function () {
    const mine = ++run;
    delete document.documentElement.dataset.drawn;
    for (const draw of [...page.tables, ...(loaded() ? page.charts : [])]) {
      await draw(page.report);
      await settled();
      if (mine !== run) return; // somebody chose otherwise meanwhile
    }
    if (loaded()) document.documentElement.dataset.drawn = "yes";
  };

  which?.addEventListener("change", page.choose);
  page.chooseColours(page.data.reports[which ? Number(which.value) : 0]); // a browser may have kept an earlier choice
  page.choose();
  addEventListener("load", () => {
    // A task that is asked for when a frame begins is done once that is painted; the next frame may be long in coming.
    requestAnimationFrame(() => setTimeout(() => {
      addEventListener("plotly", page.redraw, { once: true });
      const ends = '\n;dispatchEvent(new Event("plotly"));'; // a module in the page has no load event
      document.body.append(page.element("script", { type: "module" }, page.one("plotly").textContent + ends));
    }));
  });
})();
