// Light and dark: the style sheet has both, and the charts take their colours from it.
"use strict";
(function () {
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  const known = new Set([...document.styleSheets].flatMap((sheet) => [...sheet.cssRules]).map((rule) => rule.selectorText));
  page.kindClass = function (kind) {
    const name = `kind-${kind}`.replaceAll("_", "-");
    return known.has(`.${name}`) ? name : "kind-unattributed";
  };

  // The colour that a custom property has now; asked of an element, since light-dark() is only resolved there.
  page.colour = function (property, className = "") {
    const probe = page.element("span", { class: className, style: `color: var(${property})` });
    document.body.append(probe);
    const colour = getComputedStyle(probe).color;
    probe.remove();
    return colour;
  };
  page.kindColour = (kind) => page.colour("--kind", page.kindClass(kind));

  // Dark on pale and pale on dark: whichever has more contrast.
  page.readable = function (colour) {
    const parts = colour.match(/[\d.]+/g).slice(0, 3).map(Number);
    const [r, g, b] = parts.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.194 ? "#0e1319" : "#ffffff";
  };

  page.layout = function (extra) {
    const [text, muted, line, surface] = ["--text", "--muted", "--line", "--surface"].map((name) => page.colour(name));
    const axis = { gridcolor: line, linecolor: line, zerolinecolor: line, tickcolor: line };
    const { xaxis, yaxis, ...rest } = extra;
    return {
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: muted, size: 12, family: getComputedStyle(document.body).fontFamily },
      margin: { l: 76, r: 16, t: 24, b: 52 }, // wide enough for any: with automargin plotly draws all axes twice
      showlegend: false,
      ...(page.printing ? { width: 680 } : {}), // as wide as a sheet, whatever the window
      hoverlabel: { bgcolor: surface, bordercolor: muted, font: { color: text, size: 12 }, align: "left", namelength: -1 },
      modebar: { bgcolor: "rgba(0,0,0,0)", color: muted, activecolor: text },
      xaxis: { ...axis, ...xaxis },
      yaxis: { ...axis, ...yaxis },
      ...rest,
    };
  };
  page.config = {
    displaylogo: false,
    responsive: true,
    // Named one by one: among plotly's own choice is one that sends the data to a server.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    plotlyServerURL: "",
  };

  function set(theme) {
    root.dataset.theme = theme;
    page.one("theme").setAttribute("aria-pressed", String(theme === "dark"));
  }
  let chosen = null;
  try {
    chosen = localStorage.getItem("jaxmem-theme"); // some browsers refuse it to a file
  } catch {
    chosen = null;
  }
  page.followSystem = function () {
    set(chosen ?? (system.matches ? "dark" : "light"));
  };
  page.followSystem();
  system.addEventListener("change", () => {
    page.followSystem();
    page.redraw?.();
  });
  page.one("theme").addEventListener("click", () => {
    chosen = root.dataset.theme === "dark" ? "light" : "dark";
    try {
      localStorage.setItem("jaxmem-theme", chosen);
    } catch {
      // The choice then lasts as long as the page.
    }
    set(chosen);
    page.redraw();
  });

  // On paper everything is light, and printing does not wait.
  addEventListener("beforeprint", () => {
    page.printing = true;
    set("light");
    if (typeof Plotly !== "undefined") for (const draw of page.charts) draw(page.report);
  });
  addEventListener("afterprint", () => {
    page.printing = false;
    page.followSystem();
    page.redraw();
  });
})();
