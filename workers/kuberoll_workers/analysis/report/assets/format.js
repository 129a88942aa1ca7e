
"use strict";

const $ = (id) => document.getElementById(id);

// Text is only ever set as text; no string of a run becomes markup.
function make(name, attributes = {}, ...children) {
  const svg = ["svg", "g", "rect", "line", "text", "circle", "path"].includes(name);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en-US", { notation: "compact", maximumSignificantDigits: 3 });

// Up to four significant digits; whole numbers in full.
function number(value) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return whole.format(value);
  const size = Math.abs(value);
  if (size >= 1e6) return short.format(value);
  if (size >= 1000) return whole.format(value);
  return size !== 0 && size < 0.001 ? value.toExponential(1) : String(Number(value.toPrecision(3)));
}

function big(value) {
  return value >= 10000 ? short.format(value) : number(value);
}

// A reward, with as many decimals in every row.
function fixed(value) {
  if (value === null || value === undefined) return "–";
  return Math.abs(value) < 10000 ? value.toFixed(Math.abs(value) < 100 ? 3 : 1) : short.format(value);
}

function percent(part, all) {
  if (!all) return "–";
  const share = (100 * part) / all;
  return `${share === 0 || share >= 10 ? share.toFixed(share === 100 || share === 0 ? 0 : 1) : Number(share.toPrecision(2))} %`;
}

function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 3600 * 10) return `${number(value / 3600)} h`;
  if (value >= 600) return `${number(value / 60)} min`;
  if (value !== 0 && value < 0.1) return `${number(value * 1000)} ms`;
  return `${number(value)} s`;
}

function table(heads, rows, caption) {
  const cell = (tag) => (value, column) =>
    make(tag, { class: heads[column].n ? "n" : "text", scope: tag === "th" ? "col" : null, "data-head": tag === "td" ? heads[column].name : null }, value);
  return make("div", { class: "scroll" }, make("table", {},
    caption ? make("caption", { class: "unseen" }, caption) : null,
    make("thead", {}, make("tr", {}, heads.map((head, column) => cell("th")(head.name, column)))),
    make("tbody", {}, rows.map((row) => make("tr", {}, row.map(cell("td")))))));
}

// Trajectories that ended in ways of a kind: finished, failed or dropped.
function ended(numbers, kind) {
  return Object.entries(numbers.outcomes).reduce((sum, [name, count]) => sum + (report.endings[name].kind === kind ? count : 0), 0);
}

// The name of a way to end, in its colour.
function ending(outcome, more = "") {
  return make("span", { class: `end-${report.endings[outcome].look}` }, report.endings[outcome].title + more);
}
