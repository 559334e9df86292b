"use strict";
/* Curves over rounds, or other scales: of one run, or of a grid's combinations with their spread over the seeds. */

const FEW_LINES = 4; // up to so many, the spread over seeds is shown unless somebody hides it
const LOG_FROM = 20; // times as far as the shortest line the longest goes, where the scale below is logarithmic

/**
 * Exponential moving average: with weight w, the mean of what has come, the latest value counting 1 and one that is
 * k rounds older w^k. Gaps stay gaps.
 */
function smooth(values, weight) {
  let sum = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + value;
    mass = weight * mass + 1;
    return sum / mass;
  });
}

/** Mean of some numbers and half the width of its 95 percent interval (null of a single one). */
function meanInterval(numbers, studentT) {
  const n = numbers.length;
  const mean = numbers.reduce((sum, value) => sum + value, 0) / n;
  if (n === 1) return { mean, half: null, numbers };
  const variance = numbers.reduce((sum, value) => sum + (value - mean) ** 2, 0) / (n - 1);
  return { mean, half: studentT[n - 2] * Math.sqrt(variance / n), numbers };
}

/** Curves [{x, y}, ...] in one, round by round: {x, intervals}. */
function average(curves, studentT) {
  const byRound = new Map();
  for (const { x, y } of curves) {
    x.forEach((round, index) => {
      if (y[index] === null) return;
      if (!byRound.has(round)) byRound.set(round, []);
      byRound.get(round).push(y[index]);
    });
  }
  const x = [...byRound.keys()].sort((a, b) => a - b);
  return { x, intervals: x.map((round) => meanInterval(byRound.get(round), studentT)) };
}

/**
 * The same for curves that have their points at different x: interpolated, at all x that any of them has, from the latest
 * first one to the earliest last one.
 */
function averageInterpolated(curves, studentT) {
  const known = curves
    .map(({ x, y }) => x.map((at, index) => [at, y[index]]).filter(([at, value]) => at !== null && value !== null))
    .filter((points) => points.length > 0);
  const first = Math.max(...known.map((points) => points[0][0]));
  const last = Math.min(...known.map((points) => points.at(-1)[0]));
  const x = [...new Set(known.flat().map(([at]) => at))].filter((at) => at >= first && at <= last).sort((a, b) => a - b);
  const places = known.map(() => 0);
  const intervals = x.map((at) => {
    known.forEach((points, index) => {
      while (places[index] + 1 < points.length && points[places[index] + 1][0] <= at) places[index] += 1;
    });
    return meanInterval(known.map((points, index) => interpolated(points, places[index], at)), studentT);
  });
  return { x, intervals };
}

/** The value at `at` of a line through points, of which number `place` is the last one up to there. */
function interpolated(points, place, at) {
  const [x, y] = points[place];
  if (x === at || place + 1 === points.length) return y;
  const [nextX, nextY] = points[place + 1];
  return y + ((nextY - y) * (at - x)) / (nextX - x);
}

/** The series of one run: {key, name, colour, dash, x, y, raw}; `across` 0 are rounds, then come further scales. */
function runSeries(curves, metric, weight, across) {
  return curves.metrics[metric].series.map(({ name, values }, index) => ({
    key: name,
    name,
    colour: seriesColour(index),
    dash: "solid",
    x: across > 0 ? curves.scales[across - 1].values : roundNumbers(curves.rounds, values.length),
    y: smooth(values, weight),
    raw: weight > 0 ? values : null,
  }));
}

/**
 * The series of a grid: one per combination that the filters let through and part of the metric (test and train loss are
 * two), with low and high where seeds differ, and the curve of each seed.
 * `filters` has, for each axis, the number of the value to show, or null for all; values of the axis `colourBy` differ
 * in colour, the combinations of all others, and parts, in the dash of the line.
 */
function gridSeries(data, metric, weight, across, colourBy, filters) {
  const dashes = new Map();
  const { parts } = data.metrics[metric];
  const shown = data.combinations
    .map((place, index) => ({ place, index }))
    .filter(({ place }) => place.every((value, at) => filters[at] === null || filters[at] === value));
  return shown.flatMap(({ place, index }) => parts.map(({ name: part, values: column }) => {
    const round = Math.floor((place[colourBy] ?? 0) / PALETTE.length); // the colours come again, with another dash
    const beside = [part, round, ...place.filter((_, at) => at !== colourBy)].join();
    if (!dashes.has(beside)) dashes.set(beside, DASHES[dashes.size % DASHES.length]);
    const curves = data.curves
      .filter((curve) => curve.combination === index && (across === 0 || curve.scales[across - 1]))
      .map(({ rounds, scales, values }) => ({
        x: across > 0 ? scales[across - 1] : roundNumbers(rounds, values[column].length),
        y: smooth(values[column], weight),
      }));
    const { x, intervals } = (across > 0 ? averageInterpolated : average)(curves, data.student_t);
    const named = place.map((value, at) => data.axes[at].values[value]).filter((_, at) => filters[at] === null);
    return {
      key: part ? `${index} ${part}` : index,
      name: [...named, part].filter(Boolean).join(" · ") || "all runs",
      colour: seriesColour(place[colourBy] ?? 0),
      dash: dashes.get(beside),
      x,
      y: intervals.map(({ mean }) => mean),
      low: intervals.map(({ mean, half }) => mean - (half ?? 0)),
      high: intervals.map(({ mean, half }) => mean + (half ?? 0)),
      seeds: intervals.map(({ numbers }) => numbers),
      curves,
      banded: curves.length >= data.fewest_for_band,
    };
  }));
}

/** What shows how seeds differ: a band of intervals, or of a few seeds a thin line for each. */
function spreadTraces(series, log, opacity, share) {
  if (series.curves.length < 2) return [];
  if (series.banded) return [bandTrace(series, log, opacity, share)];
  return series.curves.map((curve) => ({
    type: "scatter",
    mode: "lines",
    ...curve,
    line: { color: faded(series.colour, 0.45), width: 1 },
    hoverinfo: "skip",
  }));
}

/** The band of a series, as a closed outline. On a log scale it stops where there is no logarithm, a share's at 0 and 1. */
function bandTrace(series, log, opacity, share) {
  const least = Math.min(...series.y.filter((value) => value > 0));
  const within = (value) => (share ? Math.min(Math.max(value, 0), 1) : value);
  const low = series.low.map(within).map((value) => (log && value <= 0 ? least / 10 : value));
  const high = series.high.map(within);
  return {
    type: "scatter",
    mode: "lines",
    x: [...series.x, ...series.x.toReversed()],
    y: [...high, ...low.toReversed()],
    fill: "toself",
    fillcolor: faded(series.colour, opacity),
    line: { width: 0 },
    hoverinfo: "skip",
  };
}

function rawTrace(series) {
  return {
    type: "scatter",
    mode: "lines",
    x: series.x,
    y: series.raw,
    line: { color: faded(series.colour, 0.3), width: 1 },
    hoverinfo: "skip",
  };
}

function lineTrace(series, unit) {
  const plainNumbers = unit === "";
  return {
    type: "scatter",
    mode: series.x.length > FEW_ROUNDS ? "lines" : "lines+markers",
    name: plain(series.name),
    x: series.x,
    y: series.y,
    line: { color: series.colour, width: 2, dash: series.dash },
    marker: { size: 5 },
    text: series.y.map((value, i) => (plainNumbers ? numberText(value) : "") + spreadText(series, i)),
    hovertemplate: plainNumbers ? "%{text}" : "%{y}%{text}",
  };
}

/** How much seeds differ at a point, in words. */
function spreadText(series, index) {
  const numbers = series.seeds?.[index];
  if (!numbers || series.curves.length < 2) return "";
  if (numbers.length === 1) return " (1 seed)";
  if (numbers.length === 2) return ` (${numbers.map(numberText).join(", ")})`;
  return ` ± ${numberText((series.high[index] - series.low[index]) / 2)} (${numbers.length} seeds)`;
}

/** The boxes below the chart that show and hide series. Boxes of series that stay are kept, and with them the focus. */
function drawLegend(series, hidden, changed) {
  const legend = element("curves-legend");
  const signature = JSON.stringify(series.map(({ key, name, colour: c, dash }) => [key, name, c, dash]));
  if (legend.dataset.signature !== signature) {
    legend.dataset.signature = signature;
    legend.replaceChildren(...series.map((one) => legendEntry(one, hidden, changed)));
  }
  legend.querySelectorAll("input").forEach((box, index) => {
    box.checked = !hidden.has(series[index].key);
  });
}

function legendEntry({ key, name, colour: stroke, dash }, hidden, changed) {
  const box = document.createElement("input");
  box.type = "checkbox";
  box.addEventListener("change", () => {
    if (box.checked) hidden.delete(key);
    else hidden.add(key);
    changed();
  });
  const swatch = document.createElement("span");
  swatch.className = "swatch";
  swatch.style.borderTopColor = stroke;
  swatch.style.borderTopStyle = dash === "solid" ? "solid" : dash.endsWith("dot") ? "dotted" : "dashed";
  const label = document.createElement("label");
  label.append(box, swatch, name);
  return label;
}

/** The axis of a scale that is not rounds; logarithmic where lines are of very different length. */
function scaleAxis(title, series) {
  const ends = series.map(({ x }) => x.at(-1)).filter((end) => end > 0);
  const log = ends.length > 0 && Math.max(...ends) >= LOG_FROM * Math.min(...ends);
  const range = log ? "normal" : "nonnegative";
  return axis(title, { type: log ? "log" : "linear", rangemode: range, unifiedhovertitle: { text: `${plain(title)} %{x:.4~g}` } });
}

/**
 * The section of curves. `metrics` are [{label, unit}, ...] and `scales` [{label, opens}, ...], against which curves can be
 * drawn beside rounds, and whether they are at first; `seriesOf(metric, weight, across)` gives what there is to draw. Returns a function that draws anew.
 */
function curvesSection(metrics, scales, seriesOf) {
  const metric = element("curves-metric");
  const against = element("curves-across"); // not there where there is only one scale
  const smoothing = element("curves-smoothing");
  const log = element("curves-log");
  const spread = element("curves-spread"); // not there for a single run
  let spreadChosen = false; // until somebody has, it is shown of few lines
  const hidden = new Set();
  metric.replaceChildren(...metrics.map(({ label }, index) => new Option(label, index)));
  against?.replaceChildren(...["rounds", ...scales.map(({ label }) => label)].map((name, index) => new Option(name, index)));
  if (against) against.value = 1 + scales.findIndex(({ opens }) => opens);

  function redraw() {
    const { label, unit, share } = metrics[metric.value];
    const across = Number(against?.value ?? 0);
    const series = seriesOf(Number(metric.value), Number(smoothing.value), across);
    const visible = series.filter(({ key }) => !hidden.has(key));
    if (spread && !spreadChosen) spread.checked = visible.length <= FEW_LINES;
    const spreading = spread?.checked ? visible : [];
    const opacity = spreading.length > FEW_LINES ? 0.1 : 0.18; // where many lie over each other, each shows less
    const traces = [
      ...spreading.flatMap((one) => spreadTraces(one, log.checked, opacity, share)),
      ...visible.filter(({ raw }) => raw).map(rawTrace),
      ...visible.map((one) => lineTrace(one, unit)),
    ];
    element("curves-smoothing-value").value = smoothing.value;
    drawLegend(series, hidden, redraw);
    draw(element("curves-chart"), traces, {
      height: 420,
      hovermode: visible.length > 12 ? "closest" : "x unified",
      uirevision: `${metric.value} ${across} ${log.checked}`, // what was zoomed into stays while the metric does
      xaxis: across > 0 ? scaleAxis(scales[across - 1].label, visible) : roundAxis(series[0]?.x ?? []),
      yaxis: valueAxis(label, unit, { type: log.checked ? "log" : "linear" }),
    });
  }

  spread?.addEventListener("input", () => {
    spreadChosen = true;
  });
  for (const control of [metric, against, smoothing, log, spread]) control?.addEventListener("input", redraw);
  element("curves-all").addEventListener("click", () => {
    hidden.clear();
    redraw();
  });
  element("curves-none").addEventListener("click", () => {
    seriesOf(Number(metric.value), 0, 0).forEach(({ key }) => hidden.add(key));
    redraw();
  });
  keepDrawn(redraw);
  return redraw;
}

function runCurvesSection(curves) {
  curvesSection(curves.metrics, curves.scales, (metric, weight, across) => runSeries(curves, metric, weight, across));
}

function gridCurvesSection(data) {
  const colourBy = element("curves-colour"); // not there for a grid over seeds alone
  const filters = [...document.querySelectorAll("#curves [data-axis]")];

  /** An axis that has the colours shows all its values. */
  function chosen() {
    return filters.map((filter, index) =>
      filter.value === "all" || index === Number(colourBy.value) ? null : Number(filter.value),
    );
  }

  function hideFilterOfColours() {
    filters.forEach((filter, index) => {
      filter.closest("label").hidden = index === Number(colourBy.value);
    });
  }

  const redraw = curvesSection(data.metrics, data.scales, (metric, weight, across) =>
    gridSeries(data, metric, weight, across, Number(colourBy?.value ?? 0), chosen()),
  );
  for (const control of filters) control.addEventListener("input", redraw);
  if (!colourBy) return;
  colourBy.addEventListener("input", () => {
    hideFilterOfColours();
    redraw();
  });
  hideFilterOfColours();
}
