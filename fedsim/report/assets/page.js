"use strict";
/* Draws the figures that Python has built. The menus of a section choose the figure to show. */

const { charts, templates, config } = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
const MOST_IN_ONE_BOX = 12; // maximum number of lines in a hover box

/** Return the current choices in the menus of a section, by menu name. */
function choicesOf(section) {
  return Object.fromEntries([...section.querySelectorAll("select, input")].map(({ name, value }) => [name, value]));
}

/** Whether every choice is "all" or among the values that its condition lists. */
function matches(conditions, chosen) {
  return Object.entries(conditions ?? {}).every(([name, values]) =>
    [values].flat().includes(chosen[name]) || chosen[name] === "all");
}

/** Draw the figure that the menus of the section choose. */
function draw(id) {
  const chart = document.getElementById(id);
  const chosen = choicesOf(chart.closest("section"));
  const figure = charts[id].find(({ when }) => matches(when, chosen));
  chart.hidden = !figure;
  const empty = chart.parentElement.querySelector(".empty");
  if (empty) empty.hidden = Boolean(figure);
  if (!figure) return;
  const template = templates[dark.matches ? "dark" : "light"];
  let traces = figure.data.filter(({ meta }) => matches(meta, chosen));
  const layout = { ...figure.layout, template };
  if (traces.some(({ legendgroup }) => legendgroup)) {
    traces = styled(traces, template.layout.colorway).flatMap((trace) => smoothed(trace, Number(chosen.smoothing ?? 0)));
    layout.yaxis = { ...layout.yaxis, type: chosen.values };
    layout.hovermode = traces.filter(({ name }) => name).length > MOST_IN_ONE_BOX ? "closest" : "x unified";
  }
  chart.style.minWidth = `${figure.min_width ?? 0}px`;
  Plotly.react(chart, traces, layout, { ...config, toImageButtonOptions: { format: "svg", filename: id } });
}

/**
 * Return traces with a colour and a dash style for each legend group. Colours show the values of the first setting by
 * which the lines differ, so that a value keeps its colour while others are hidden. Lines of one colour differ in dashes.
 */
function styled(traces, colors) {
  const axes = Object.keys(traces[0].meta).filter((name) => name.startsWith("axis")).sort();
  const axis = axes.find((name) => new Set(traces.map(({ meta }) => meta[name])).size > 1) ?? axes[0];
  const groups = [...new Set(traces.map(({ legendgroup }) => legendgroup))];
  const alike = {}; // legend groups with the same value of this setting
  return traces.map((trace) => {
    const place = Number(axis ? trace.meta[axis] : groups.indexOf(trace.legendgroup));
    const same = (alike[place] ??= new Set()).add(trace.legendgroup);
    const color = colors[place % colors.length];
    const index = Math.floor(place / colors.length) + [...same].indexOf(trace.legendgroup);
    const dash = trace.name ? DASHES[index % DASHES.length] : "solid";
    return { ...trace, line: { ...trace.line, color, dash }, fillcolor: color };
  });
}

/**
 * Return a named line as its exponential moving average, with the recorded values as a faint line behind it. A value
 * that is k points older than the latest value has weight `weight` ** k.
 */
function smoothed(trace, weight) {
  if (!trace.name || !weight) return [trace];
  let sum = 0;
  let mass = 0;
  const y = trace.y.map((value) => {
    if (value === null) return null;
    sum = weight * sum + value;
    mass = weight * mass + 1;
    return sum / mass;
  });
  const recorded = { ...trace, uid: undefined, name: "", opacity: 0.3, showlegend: false, hoverinfo: "skip", hovertemplate: undefined };
  return [recorded, { ...trace, y }];
}

/** Sort a table by the column of a button, in descending order on the first click. */
function sortBy(button) {
  const head = button.closest("th");
  const table = button.closest("table");
  const direction = head.ariaSort === "descending" ? "ascending" : "descending";
  for (const other of head.parentElement.cells) other.ariaSort = null;
  head.ariaSort = direction;
  table.classList.remove("grouped");
  const rows = [...table.tBodies[0].rows].sort((a, b) => compareCells(a.cells[head.cellIndex], b.cells[head.cellIndex]));
  table.tBodies[0].append(...(direction === "ascending" ? rows : rows.reverse()));
}

/** Compare two cells by number if at least one has a number (cells without a number come first), else by text. */
function compareCells(a, b) {
  if (!("sort" in a.dataset || "sort" in b.dataset)) {
    return a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
  }
  return Number(a.dataset.sort ?? -Infinity) - Number(b.dataset.sort ?? -Infinity) || 0;
}

for (const button of document.querySelectorAll("th button")) button.addEventListener("click", () => sortBy(button));
for (const id of Object.keys(charts)) {
  draw(id);
  document.getElementById(id).closest("section").addEventListener("input", () => draw(id));
  dark.addEventListener("change", () => draw(id));
}
