"""The chart of the tests of single workers."""

from __future__ import annotations

from typing import Any

from fedsim.engines.worker_evaluation import WorkerResults
from fedsim.records.worker_results import LABELS
from fedsim.report.figure import PALETTE, axis, figure


def workers_chart(results: WorkerResults) -> dict[str, Any]:
    """The scores of the workers in ascending order, with a line for each model."""
    n, traces = len(results.workers), []
    for index, (model, values) in enumerate(results.scores.items()):
        order = sorted(range(n), key=values.__getitem__)
        trace = {
            "type": "scatter",
            "mode": "lines+markers" if n <= 100 else "lines",
            "name": LABELS[model],
            "x": [100 * (place + 0.5) / n for place in range(n)],
            "y": [round(values[i], 4) for i in order],
            "customdata": [[results.workers[i], results.samples[i]] for i in order],
            "hovertemplate": "worker %{customdata[0]}, %{customdata[1]} samples<br>%{y}",
            "line": {"color": PALETTE[index]},
        }
        traces.append(trace)
    layout = {
        "height": 340,
        "xaxis": axis("percent of workers", range=[0, 100]),
        "yaxis": axis(f"{results.score_name} after round {results.round}", rangemode="tozero"),
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom"},
    }
    return figure(traces, layout)
