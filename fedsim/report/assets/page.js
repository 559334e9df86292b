"use strict";
/* Puts the page's numbers into its charts, and life into its controls. */

function runPage(data) {
  runCurvesSection(data.curves);
  if (data.weights) keepDrawn(() => drawWeights(element("weights-chart"), data.weights));
  if (data.partition) keepDrawn(() => drawPartition(element("partition-chart"), data.partition));
  keepDrawn(() => drawTimeOverRounds(element("time-chart"), data.time));
}

function gridPage(data) {
  gridCurvesSection(data);
  heatMapSection(data);
  keepDrawn(() => drawTimeByCombination(element("time-chart"), data));
  singleRunSection(data);
}

function heatMapSection(data) {
  const value = element("heat-map-value");
  if (!value) return;
  const filters = [...document.querySelectorAll(".heat-map-filter")];
  value.replaceChildren(...data.final.map(({ label }, index) => new Option(label, index)));
  const redraw = () => {
    if (!data.final.length) return;
    const chosen = data.final[value.value];
    const [rows, columns] = data.axes;
    element("heat-map-title").textContent = `${chosen.label} by ${rows.name} and ${columns.name}`;
    const fixed = filters.map((filter) => Number(filter.value));
    drawAxes(element("heat-map-chart"), data, chosen, fixed);
  };
  for (const control of [value, ...filters]) control.addEventListener("input", redraw);
  keepDrawn(redraw);
}

function singleRunSection(data) {
  const choice = element("run-choice");
  const redraw = () => {
    const { weights, partition } = data.runs[choice.value];
    drawOrSayNothing("weights", weights, drawWeights);
    drawOrSayNothing("partition", data.partitions[partition], drawPartition);
  };
  choice.addEventListener("input", redraw);
  keepDrawn(redraw);
}

/** Draw a picture of the chosen run, or show the line that says that there is none. */
function drawOrSayNothing(section, picture, drawPicture) {
  const chart = element(`${section}-chart`); // not there if no run has one
  if (!chart) return;
  chart.hidden = !picture;
  element(`${section}-key`).hidden = !picture;
  element(`${section}-empty`).hidden = Boolean(picture);
  if (picture) drawPicture(chart, picture);
}

/** Sort a table by the column of a head that is pressed; again, the other way round. */
function makeSortable(table) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => {
      const ascending = head.getAttribute("aria-sort") === "descending";
      table.classList.remove("grouped");
      heads.forEach((other) => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", ascending ? "ascending" : "descending");
      const rows = [...table.tBodies[0].rows].sort((a, b) => compareCells(a.cells[column], b.cells[column]));
      table.tBodies[0].append(...(ascending ? rows : rows.reverse()));
    });
  });
}

/** By number where cells have one, else by text; cells without a number come first. */
function compareCells(a, b) {
  if ("sort" in a.dataset || "sort" in b.dataset) {
    return Number(a.dataset.sort ?? -Infinity) - Number(b.dataset.sort ?? -Infinity) || 0;
  }
  return a.textContent.localeCompare(b.textContent, undefined, { numeric: true });
}

document.querySelectorAll("table.sortable").forEach(makeSortable);
{
  const data = JSON.parse(element("data").textContent);
  if (data.kind === "run") runPage(data);
  else gridPage(data);
}
