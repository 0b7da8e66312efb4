"use strict";
// What all pages share: numbers in words, elements and tables, ticks of an axis, light and dark.

const grouped = value => Math.round(value).toLocaleString("en-US");
function significant(value, scale = 1) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  value *= scale;
  if (Math.abs(value) < 0.5e-6) return "0";
  const decimals = Math.min(Math.max(2 - Math.floor(Math.log10(Math.abs(value))), 0), 6);
  return value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals });
}
const capitalised = text => text[0].toUpperCase() + text.slice(1);
function percent(share) {
  if (share === null || share === undefined || Number.isNaN(share)) return "–";
  if (share > 0 && share < 0.01) return "<1 %";
  if (share > 0.99 && share < 1) return ">99 %";
  return `${(share * 100).toFixed(0)} %`;
}
const unitOf = seconds => (seconds >= 1 || !seconds ? ["s", 1] : seconds < 1e-4 ? ["µs", 1e6] : ["ms", 1e3]);
function inUnit(seconds) {
  const [unit, scale] = unitOf(Math.abs(seconds));
  return `${significant(seconds, scale)} ${unit}`;
}

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.filter(child => child !== null && child !== undefined).map(child => (child instanceof Node ? child : String(child))));
  return made;
}

/** rows: lists of cells; numbers: the columns of numbers; links: what a click on a row does. */
function table(caption, heads, rows, numbers = [], links = null) {
  const kind = k => (numbers.includes(k) ? "number" : undefined);
  return element("table", {},
    element("caption", { style: "text-align:left;color:var(--muted);padding-bottom:4px" }, caption),
    element("thead", {}, element("tr", {}, ...heads.map((head, k) => element("th", { class: kind(k), scope: "col" }, head)))),
    element("tbody", {}, ...rows.map((cells, row) => {
      const act = links && links[row];
      return element("tr", act ? { class: "link", tabindex: 0, onclick: act, onkeydown: event => event.key === "Enter" && act() } : {},
        ...cells.map((cell, k) => element("td", { class: kind(k) }, cell)));
    })));
}

/** The smallest of 1, 2 and 5 times a power of ten that is at least this number. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(least));
  return [1, 2, 5, 10].map(one => one * power).find(one => one >= least);
}

/** Round values for the ticks of an axis, and their texts. */
function ticks(low, high, wanted) {
  const step = roundStep((high - low) / wanted || 1), found = [];
  for (let value = Math.ceil(low / step) * step; value <= high + step * 1e-9; value += step) found.push(value);
  const decimals = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
  return found.map(value => [value, value.toLocaleString("en-US", { minimumFractionDigits: decimals, maximumFractionDigits: decimals })]);
}

/** Ticks of a logarithmic axis: powers of ten where there are several, else also twice and five times them. */
function logTicks(low, high, wanted) {
  for (const steps of [[1], [1, 2, 5]]) {
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) found.push(...steps.map(step => step * 10 ** power));
    const inside = found.filter(value => value >= low * 0.999 && value <= high * 1.001);
    if (inside.length > 2) return inside.map(value => [value, Number(value.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 9 })]);
  }
  return ticks(low, high, wanted);
}

/** The ticks of which the texts do not touch: the last one, and each that has room between the one before it and the last. */
function withRoom(marks, at) {
  const halfWidth = text => String(text).length * 3.3 + 4, touches = ([a, one], [b, other]) => Math.abs(at(b) - at(a)) < halfWidth(one) + halfWidth(other);
  const last = marks[marks.length - 1], found = [];
  for (const mark of marks.slice(0, -1)) if (!touches(mark, last) && (!found.length || !touches(found[found.length - 1], mark))) found.push(mark);
  return last ? [...found, last] : [];
}

/** Switches between light and dark with the button, and calls `changed` after each change. */
function onTheme(changed) {
  document.getElementById("theme").onclick = () => {
    const root = document.documentElement, dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    changed();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", changed);
}
