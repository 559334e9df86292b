"use strict";
/* Heat maps and bars: weights of workers, partition, two axes of a grid, time by phase. */

const FEW_WORKERS = 40; // up to so many, each has its name and cells are set apart
const STRIP = { near: 2, far: 8 }; // pixels from the axis, of the strip that marks Byzantine workers

function workerName(worker, byzantine) {
  return byzantine.has(worker) ? `${worker} (B)` : String(worker);
}

/** Runs of consecutive positions at which `workers` are Byzantine, as [first, last]. */
function byzantineRuns(workers, byzantine) {
  const runs = [];
  workers.forEach((worker, position) => {
    if (!byzantine.has(worker)) return;
    const last = runs.at(-1);
    if (last && last[1] === position - 1) last[1] = position;
    else runs.push([position, position]);
  });
  return runs;
}

/** Strips beside an axis of workers, "x" or "y", along those that are Byzantine. */
function byzantineStrips(along, workers, byzantine) {
  const across = along === "x" ? "y" : "x";
  return byzantineRuns(workers, byzantine).map(([first, last]) => ({
    type: "rect",
    [`${along}ref`]: along,
    [`${along}0`]: first - 0.5,
    [`${along}1`]: last + 0.5,
    [`${across}ref`]: "paper",
    [`${across}sizemode`]: "pixel",
    [`${across}anchor`]: 0,
    [`${across}0`]: -STRIP.near,
    [`${across}1`]: -STRIP.far,
    line: { width: 0 },
    fillcolor: colour("byzantine"),
  }));
}

/** An axis of workers, with room for the strip. */
function workerAxis(further) {
  return axis("worker", {
    type: "category",
    ticks: "outside",
    ticklen: STRIP.far + 2,
    tickcolor: "rgba(0, 0, 0, 0)",
    showgrid: false,
    zeroline: false,
    ...further,
  });
}

function drawWeights(target, picture) {
  const { rounds, workers, weights, excluded, per_column: perColumn } = picture;
  const byzantine = new Set(picture.byzantine);
  const names = workers.map((worker) => workerName(worker, byzantine));
  const out = workers.map(() => rounds.map(() => null));
  for (const [row, column] of excluded) out[row][column] = 1;
  const [least, most] = extremes([0, ...weights.flat().filter((weight) => weight !== null)]);
  const cells = { type: "heatmap", x: rounds, y: names, hoverongaps: false };
  const few = workers.length <= FEW_WORKERS;
  const gap = few && rounds.length <= FEW_ROUNDS ? 1 : 0;
  const roundText = perColumn > 1 ? `rounds from %{x}` : "round %{x}";
  element("weights-binning").textContent =
    perColumn > 1 ? `Each column is the mean of ${perColumn} rounds.` : "";
  drawRampKey("weights-key", "weight", least, most);
  draw(
    target,
    [
      {
        ...cells,
        z: weights,
        zmin: least,
        zmax: most,
        colorscale: ramp(),
        showscale: false,
        xgap: gap,
        ygap: gap,
        hovertemplate: `worker %{y}, ${roundText}<br>weight %{z:.4~g}<extra></extra>`,
      },
      {
        ...cells,
        z: out,
        colorscale: [[0, colour("excluded")], [1, colour("excluded")]],
        showscale: false,
        xgap: gap,
        ygap: gap,
        hovertemplate: `worker %{y}, ${roundText}<br>screened out<extra></extra>`,
      },
    ],
    {
      height: (few ? Math.max(18 * workers.length, 120) : 640) + 60,
      xaxis: roundAxis(rounds, { showgrid: false, zeroline: false }),
      yaxis: workerAxis({ autorange: "reversed", dtick: few ? 1 : undefined }),
      shapes: byzantineStrips("y", workers, byzantine),
    },
  );
}

function drawPartition(target, picture) {
  const { counts } = picture;
  const byzantine = new Set(picture.byzantine);
  const workers = picture.workers ?? counts.map((_, worker) => worker);
  element("partition-sample").textContent = picture.workers
    ? `These are ${workers.length} of the ${picture.population?.toLocaleString("en") ?? "many"} workers, drawn at random.`
    : "";
  const names = workers.map((worker) => workerName(worker, byzantine));
  const labels = counts[0].map((_, label) => label);
  const sizes = counts.map((row) => row.reduce((sum, count) => sum + count, 0));
  const few = workers.length <= FEW_WORKERS;
  if (few) target.style.minWidth = `${26 * workers.length + 140}px`;
  else target.style.removeProperty("min-width");
  const [, most] = extremes(counts.flat());
  drawRampKey("partition-key", "samples", 0, most);
  draw(
    target,
    [
      {
        type: "heatmap",
        x: names,
        y: labels.map(String),
        z: labels.map((label) => counts.map((row) => row[label])),
        colorscale: ramp(),
        zmin: 0,
        zmax: most,
        xgap: few ? 1 : 0,
        ygap: few ? 1 : 0,
        texttemplate: few ? "%{z}" : undefined,
        showscale: false,
        hovertemplate: "worker %{x}, label %{y}<br>%{z} samples<extra></extra>",
      },
      {
        type: "bar",
        x: names,
        y: sizes,
        yaxis: "y2",
        marker: { color: workers.map((worker) => colour(byzantine.has(worker) ? "byzantine" : "ramp-1")) },
        hovertemplate: "worker %{x}<br>%{y} samples<extra></extra>",
      },
    ],
    {
      height: Math.min(24 * labels.length, 480) + 170,
      bargap: 0.15,
      xaxis: workerAxis({ anchor: "y", dtick: few ? 1 : undefined }),
      yaxis: axis("label", {
        type: "category",
        autorange: "reversed",
        domain: [0, 0.78],
        showgrid: false,
        zeroline: false,
      }),
      yaxis2: axis("samples", { domain: [0.82, 1], nticks: 3 }),
      shapes: byzantineStrips("x", workers, byzantine),
    },
  );
}

function drawTimeOverRounds(target, { rounds, phases, seconds }) {
  const x = roundNumbers(rounds, seconds[0]?.length ?? 0);
  const bars = x.length <= FEW_ROUNDS;
  const traces = phases.map((phase, index) => ({
    ...(bars
      ? { type: "bar", marker: { color: seriesColour(index) } }
      : { type: "scatter", mode: "none", stackgroup: "phases", fillcolor: seriesColour(index) }),
    name: plain(phase.replaceAll("_", " ")),
    x,
    y: seconds[index],
  }));
  draw(target, traces, {
    height: 320,
    barmode: "stack",
    hovermode: "x unified",
    ...phaseLegend(),
    xaxis: roundAxis(x),
    yaxis: valueAxis("seconds of a round", "s", { rangemode: "tozero" }),
  });
}

/** One bar per combination, the first on top. */
function drawTimeByCombination(target, data) {
  const names = data.combinations.map(
    (place) => tickText(place.map((value, at) => data.axes[at].values[value]).join(" · ")) || "all runs",
  );
  const positions = names.map((_, index) => index);
  const traces = data.time.phases.map((phase, index) => ({
    type: "bar",
    orientation: "h",
    name: plain(phase.replaceAll("_", " ")),
    x: data.time.seconds.map((seconds) => seconds[index]),
    y: positions, // not the names: two values of an axis may be shown alike
    marker: { color: seriesColour(index) },
    hovertemplate: "%{x}",
  }));
  draw(target, traces, {
    height: 17 * names.length + 130,
    barmode: "stack",
    hovermode: "y unified",
    ...phaseLegend(),
    xaxis: valueAxis("seconds of a round", "s", { rangemode: "tozero" }),
    yaxis: axis("", {
      autorange: "reversed",
      tickmode: "array",
      tickvals: positions,
      ticktext: names,
      tickfont: { size: 11 },
      showgrid: false,
    }),
  });
}

function phaseLegend() {
  return {
    showlegend: true,
    legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", traceorder: "normal" },
    margin: { l: 48, r: 12, t: 36, b: 40 },
  };
}

/** The first two axes of a grid against each other; `fixed` has the value of each further axis. */
function drawAxes(target, data, { label, cells }, fixed) {
  const [rows, columns] = data.axes;
  const found = new Map(data.combinations.map((place, index) => [place.join(), cells[index]]));
  const cellAt = (row, column) => found.get([row, column, ...fixed].join()) ?? null;
  const table = rows.values.map((_, row) => columns.values.map((__, column) => cellAt(row, column)));
  const [least, most] = extremes(cells.filter((cell) => cell).map(([mean]) => mean));
  drawRampKey("heat-map-key", label.toLowerCase(), least, most);
  const text = table.map((row) => row.map((cell) => (cell ? cell.slice(1, 3).filter(Boolean).join("<br>") : "")));
  const labelAxis = (name, values) =>
    axis(name, {
      tickmode: "array",
      tickvals: values.map((_, index) => index),
      ticktext: values.map(tickText),
      showgrid: false,
      zeroline: false,
    });
  target.style.minWidth = `${110 * columns.values.length + 140}px`;
  draw(
    target,
    [
      {
        type: "heatmap",
        x: columns.values.map((_, index) => index),
        y: rows.values.map((_, index) => index),
        z: table.map((row) => row.map((cell) => cell?.[0] ?? null)),
        text,
        texttemplate: "%{text}",
        textfont: { size: 12 },
        colorscale: ramp(),
        zmin: least,
        zmax: most,
        showscale: false,
        xgap: 2,
        ygap: 2,
        hoverongaps: false,
        customdata: table.map((row, i) =>
          row.map((cell, j) => [plain(rows.values[i]), plain(columns.values[j]), cell?.slice(1, 3).join(" "), cell?.[3]]),
        ),
        hovertemplate: "%{customdata[0]}, %{customdata[1]}<br>%{customdata[2]}, seeds: %{customdata[3]}<extra></extra>",
      },
    ],
    {
      height: 46 * rows.values.length + 90,
      xaxis: labelAxis(columns.name, columns.values),
      yaxis: { ...labelAxis(rows.name, rows.values), autorange: "reversed" },
    },
  );
}
