"""Content of the HTML report of a run: texts, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedsim.comparison.figures import timeline
from fedsim.core.confidence import estimate
from fedsim.core.input_limits import leaves_of
from fedsim.errors import called, plural
from fedsim.records import formatting as fmt
from fedsim.records.numbers import best_score
from fedsim.records.reader import Run
from fedsim.records.record import Metric, mean_staleness, metrics_in, score_in
from fedsim.records.worker_results import LABELS
from fedsim.report import on_page
from fedsim.report.on_page import charts_of, line_name, scale_choices

MOST_ROWS = 1_000  # maximum number of rows in the table of rounds

MEANS = ("mean", "weighted_mean")  # rules that are not shown for asynchronous runs

# Settings in the head of the report: a name, and the keys of the experiment to look up.
FACTS = {
    "data": ("data.name", "data"),
    "model": ("model.name", "model"),
    "workers": ("workers",),
    "cohort": ("cohort",),
    "partition": ("partition.name", "partition"),
    "rule": ("aggregate.rule", "aggregate"),
    "attack": ("attack.name", "attack"),
    "server": ("server.name", "server"),
    "seed": ("seed",),
    "mode": ("mode",),
    "policy": ("policy.name", "policy"),
}


def run_page(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the variables of the HTML page of a run, and the lists of figures of its charts."""
    shown = timeline(run)
    figures: dict[str, list[Any]] = {
        "curves-chart": on_page.run_curves(run),
        "timeline-chart": [shown and on_page.timeline_chart(shown)],
        "time-chart": [on_page.run_time(run)],
        "weights-chart": [on_page.weights_heat_map(run)],
        "partition-chart": [on_page.partition_heat_map(run.partition)],
        "workers-chart": [run.workers and on_page.workers_chart(run.workers)],
    }
    charts = {name: of_chart for name, of_chart in figures.items() if of_chart[0]}
    context = {
        "name": run.name,
        "title": run.name,
        "facts": facts(run),
        "tiles": tiles(run),
        "notes": notes(run),
        "experiment": fmt.flatten(run.experiment),
        "environment": fmt.flatten(run.environment),
        "table": rounds_table(run),
        "metrics": [chart.label for chart in charts_of([run])],
        "scales": scale_choices([run]),
        "weights_note": weights_note([run]),
        "timeline": shown,
        "tested": run.workers and run.workers.score_name,
    }
    return context, charts


def facts(run: Run) -> list[tuple[str, str]]:
    """Return the settings that the report shows at the top, as pairs of name and text."""
    values = dict(leaves_of(run.experiment))
    values |= {key: value for key, value in run.experiment.items() if not isinstance(value, dict)}
    values_by_word = {word: next((values[key] for key in keys if key in values), None) for word, keys in FACTS.items()}
    if run.experiment.get("mode", "rounds") == "rounds":
        values_by_word |= {"mode": None, "policy": None}
    if run.history[-1].asynchronous is not None and values_by_word["rule"] in MEANS:
        values_by_word["rule"] = None  # the policy applies each result
    values_by_word["device"] = run.environment.get("device")
    return [(word, fmt.label(value)) for word, value in values_by_word.items() if value is not None]


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """Return the most important numbers of a run, as triples of name, value and remark."""
    last = run.history[-1]
    best, score = best_score(run.history), score_in(run.history)
    best_round = next((record.round for record in run.history if score.read(record) == best), None)
    quantity = score.key.removeprefix("test_")
    show_score = fmt.fraction if score.share else fmt.number
    remark = f"test loss {fmt.number(last.test_loss)}" if score.share else "mean over the test samples"
    repeated = 0
    if (race := last.race) is not None and (race.runs or 1) > 1:
        repeated = len(values := race.test_accuracies if score.share else race.test_losses)
        if spread := estimate([value for value in values if value is not None]):
            remark = f"{spread.spread()}, {repeated} repetitions"
    seconds = [record.total_seconds for record in run.history if record.total_seconds is not None]
    sent = [record.total_bytes for record in run.history if record.total_bytes is not None]
    shown = [
        (f"final {quantity}", show_score(score.read(last)), remark),
        (f"best {quantity}", show_score(best), f"in round {best_round}"),
        (
            "rounds",
            str(len(run.history)),
            "stopped early" if run.stopped else "all finished" if run.finished else f"of {run.planned}",
        ),
    ]
    if run.workers:
        tested, value = run.workers, run.workers.means()[f"worker_{run.workers.score_name}"]
        remark = f"{LABELS[tested.used]}, {plural(len(tested.workers), 'worker')}"
        shown.insert(2, (f"worker {tested.score_name}", show_score(value), remark))
    if seconds:
        each = f"{fmt.seconds(sum(seconds) / len(seconds))} per round"
        shown.append(("time", fmt.seconds(sum(seconds)), f"{each}, all repetitions" if repeated else each))
    if last.virtual_seconds is not None:
        per_round = fmt.amount(last.virtual_seconds / len(run.history))
        shown.append(("virtual time", f"{fmt.amount(last.virtual_seconds)} s", f"{per_round} s per round"))
    if last.asynchronous is not None and last.asynchronous.updates is not None:
        staleness = fmt.amount(mean_staleness(run.history))
        shown.append(("updates", f"{last.asynchronous.updates:,}", f"mean staleness {staleness}"))
    if last.race is not None and last.race.lost_fraction is not None:
        shown.append(("updates lost", fmt.percent(last.race.lost_fraction), "of the last round, overwritten by others"))
    if sent:
        shown.append(("sent", fmt.size(sum(sent)), "up and down"))
    if at_top := sum(record.top_bytes or 0 for record in run.history):
        shown.append(("sent at the top", fmt.size(at_top), "between groups and top level"))
    if last.attack_success is not None:
        shown.append(("attack success", fmt.fraction(last.attack_success), "in the last round"))
    if (share := run.byzantine_weight) is not None:
        shown.append(("Byzantine weight", fmt.percent(share), "mean over rounds"))
    return shown


def notes(run: Run) -> list[str]:
    """Return warnings about races, an early stop, missing rounds and missing files."""
    sentences = []
    if (race := run.history[-1].race) is not None:
        sentences.append(f"{fmt.race_caveat(race.runs or 1).capitalize()}.")
    if run.stopped:
        sentences.append(f"Stopped after round {len(run.history)} of {run.planned}: {run.stopped}.")
    elif not run.finished:
        sentences.append(f"Not finished: {len(run.history)} of {run.planned} rounds.")
    attack = run.experiment.get("attack")
    if isinstance(attack, dict) and attack.get("resample") is True:
        sentences.append(
            "The Byzantine workers change from round to round (attack.resample), so no worker is marked (B)."
        )
    if run.torn:
        sentences.append("The last line of metrics.jsonl is incomplete and was left out.")
    if not run.experiment:
        sentences.append("The file experiment.toml is missing, so the settings are unknown.")
    return sentences


def weights_note(runs: Sequence[Run]) -> str | None:
    """Return why there is no heat map of aggregation weights; None if the training has no such weights."""
    if all(run.history[-1].asynchronous is not None for run in runs):
        return None
    if any(record.weights is not None for run in runs for record in run.history):
        return "This aggregation rule does not weight whole updates, and no worker was excluded."
    return "No worker weights were recorded."


def rounds_table(run: Run) -> dict[str, Any]:
    """Return the table of rounds as variables of the HTML page. In long runs, it shows only every n-th round."""
    every = math.ceil(len(run.history) / MOST_ROWS)
    shown = [*run.history[:-1:every], run.history[-1]]
    columns = [("round", [str(record.round) for record in shown])]
    for metric in metrics_in(run.history):
        columns.append((line_name(metric), [show(metric, metric.read(record)) for record in shown]))
    columns.append(("cohort", [str(len(record.cohort)) for record in shown]))
    for name in ("excluded", "dropped"):
        if any(getattr(record, name) for record in run.history):
            workers = [[called(worker, run.partition.names) for worker in getattr(record, name)] for record in shown]
            columns.append((name, [", ".join(of_round) or fmt.MISSING for of_round in workers]))
    head, cells = zip(*columns, strict=True)
    return {"head": head, "rows": list(zip(*cells, strict=True)), "every": every, "rounds": len(run.history)}


def show(metric: Metric, value: float | None) -> str:
    """Return the value of a metric as text with its unit."""
    if metric.unit == "s":
        return fmt.seconds(value)
    if metric.unit == "B":
        return fmt.size(value)
    return fmt.number(value) if isinstance(value, float) else fmt.amount(value)
