// Bytes and shares in words, rounded as jaxmem rounds them everywhere: a tie goes to the even digit.
"use strict";
(function () {
  // Exact for whole numbers of bytes, since the sizes of units are powers of two.
  function rounded(value, digits) {
    const scaled = Math.abs(value) * 10 ** digits;
    const down = Math.floor(scaled);
    const rest = scaled - down;
    const whole = rest > 0.5 || (rest === 0.5 && down % 2 === 1) ? down + 1 : down;
    return `${value < 0 ? "-" : ""}${(whole / 10 ** digits).toFixed(digits)}`;
  }

  page.bytes = function (value) {
    if (value === null || value === undefined) return "-";
    for (const [unit, size, digits] of [["GiB", 2 ** 30, 2], ["MiB", 2 ** 20, 1], ["KiB", 2 ** 10, 1]]) {
      if (Math.abs(value) >= size) return `${rounded(value / size, digits)} ${unit}`;
    }
    return `${value} B`;
  };

  page.share = function (part, whole) {
    if (!whole || part === null || part === undefined) return "";
    const share = part / whole;
    return share > 0 && share < 0.005 ? "<1%" : `${rounded(share * 100, 0)}%`;
  };

  // The unit in which an axis up to `most` bytes is read.
  page.unit = function (most) {
    for (const [name, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
      if (most >= size) return { name, size };
    }
    return { name: "B", size: 1 };
  };
})();
