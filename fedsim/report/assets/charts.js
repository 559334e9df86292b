"use strict";
/* What all charts share: colours from the style sheet, text that stays text, and one way of drawing. */

const PALETTE = [
  "#4269d0", "#e8a013", "#e8594b", "#3aa8a0", "#3ca951", "#e070a0", "#a463f2", "#6fa3ea", "#9c6b4e", "#8b9099",
];
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const LONGEST_TICK = 48; // characters
const FEW_ROUNDS = 50; // up to so many, points are marked and bars are drawn

const dark = matchMedia("(prefers-color-scheme: dark)");
const coarsePointer = matchMedia("(pointer: coarse)");
const drawings = []; // functions that draw a chart anew

/** Draw a chart, now and whenever the colour scheme changes. */
function keepDrawn(draw) {
  drawings.push(draw);
  draw();
}

dark.addEventListener("change", () => drawings.forEach((draw) => draw()));

function element(id) {
  return document.getElementById(id);
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

/** A colour as #rrggbb with an opacity. */
function faded(hex, opacity) {
  const [red, green, blue] = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${red}, ${green}, ${blue}, ${opacity})`;
}

function seriesColour(index) {
  return PALETTE[index % PALETTE.length];
}

function ramp() {
  return [[0, colour("ramp-0")], [0.5, colour("ramp-1")], [1, colour("ramp-2")]];
}

/** Text for Plotly, which would read tags and formulas in it. */
function plain(text) {
  const meant = { "&": "&amp;", "<": "&lt;", ">": "&gt;", $: "&#36;" };
  return String(text).replace(/[&<>$]/g, (character) => meant[character]);
}

/** The same, cut where it would leave no room for the chart. */
function tickText(text) {
  return plain(text.length > LONGEST_TICK ? `${text.slice(0, LONGEST_TICK - 1)}…` : text);
}

/** The numbers of a run's rounds; null stands for 1, 2, 3, ... */
function roundNumbers(rounds, count) {
  return rounds ?? Array.from({ length: count }, (_, index) => index + 1);
}

/** A number to four decimals, a half away from zero, as tables have it; a whole one or a tiny one as it is. */
function numberText(value) {
  if (value === null || Number.isInteger(value)) return String(value ?? "");
  if (Math.abs(value) < 1e-3) return value.toPrecision(3);
  const scaled = Number((Math.abs(value) * 1e4).toPrecision(12)); // the error of a float sum lies beyond 12 digits
  return ((Math.sign(value) * Math.round(scaled)) / 1e4).toFixed(4);
}

/** An axis; `further` has the last word. */
function axis(title, further = {}) {
  return {
    title: { text: plain(title), standoff: 8 },
    automargin: true,
    gridcolor: colour("grid"),
    linecolor: colour("line"),
    zerolinecolor: colour("line"),
    ...further,
  };
}

/** The axis of rounds `x`: whole numbers, however few there are. */
function roundAxis(x, further = {}) {
  const few = x.length > 0 && x.at(-1) - x[0] <= 12;
  return axis("round", { dtick: few ? 1 : undefined, rangemode: "nonnegative", unifiedhovertitle: { text: "round %{x}" }, ...further });
}

/** The axis of values in a unit: "" (a plain number), "s" or "B". */
function valueAxis(title, unit, further = {}) {
  const formats = {
    s: { ticksuffix: " s", hoverformat: ".3g", tickformat: "~g" },
    B: { ticksuffix: "B", hoverformat: ".4s", tickformat: "~s" },
  };
  return axis(title, { hoverformat: ".4~f", ...formats[unit], ...further });
}

/** The key to a heat map's colours, in the line above it. */
function drawRampKey(target, title, least, most) {
  const number = (value) => String(Number(value.toPrecision(3)));
  const gradient = document.createElement("span");
  gradient.className = "gradient";
  element(target).replaceChildren(`${title}: ${number(least)} `, gradient, ` ${number(most)}`);
}

/** The least and the greatest of some numbers. */
function extremes(numbers) {
  return numbers.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
}

/** Draw traces into an element. Repeated drawing changes what is there. */
function draw(target, traces, layout) {
  const text = colour("text");
  const shared = {
    autosize: true,
    paper_bgcolor: "rgba(0, 0, 0, 0)",
    plot_bgcolor: "rgba(0, 0, 0, 0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 13, color: text },
    margin: { l: 48, r: 12, t: 30, b: 40 },
    showlegend: false,
    dragmode: coarsePointer.matches ? false : "zoom", // a finger on a chart scrolls the page
    hoverlabel: { bgcolor: colour("card"), bordercolor: colour("line"), font: { color: text }, namelength: -1 },
    modebar: { bgcolor: "rgba(0, 0, 0, 0)", color: colour("quiet"), activecolor: colour("accent") },
  };
  return Plotly.react(target, traces, { ...shared, ...layout }, {
    responsive: true,
    displaylogo: false,
    toImageButtonOptions: { format: "svg", filename: target.id },
    // All of them by name: among those that come by themselves is one that sends the chart to a server.
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]],
    plotlyServerURL: "",
    typesetMath: false,
  });
}
