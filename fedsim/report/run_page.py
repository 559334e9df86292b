"""The page about one run: its texts and tables, and the numbers for its charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from fedsim.report import words
from fedsim.report.comparison import best_accuracy
from fedsim.report.figures import (
    byzantine_weight,
    partition_picture,
    phases_of,
    run_curves,
    run_time,
    scales_of,
    total_bytes,
    total_seconds,
    weights_picture,
)
from fedsim.report.reading import Round, Run
from fedsim.runs.progress import mean_staleness

MOST_ROWS = 1_000  # of the table of rounds

# What the head of the page says of an experiment: word, and the keys whose values stand beside it.
FACTS = (
    ("data", "data.dataset"),
    ("model", "model.name"),
    ("workers", "workers"),
    ("cohort", "cohort"),
    ("partition", "partition.strategy"),
    ("rule", "aggregate.rule"),
    ("attack", "attack.name"),
    ("server", "server.optimizer"),
    ("seed", "seed"),
)
FACTS_OF_MODES = (("mode", "mode"), ("policy", "policy.name"))  # said where the mode is not the ordinary one


def run_context(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the template shows, and what the scripts draw."""
    weights = weights_picture(run)
    partition = partition_picture(run.partition)
    context = {
        "name": run.name,
        "title": run.name,
        "facts": facts(run),
        "tiles": tiles(run),
        "notes": notes(run),
        "settings": list(words.flatten(run.experiment)),
        "environment": list(words.flatten(run.environment)),
        "table": rounds_table(run),
        "scales": bool(scales_of([run])),
        "weights_note": weights_note(run),
        "has_weights": weights is not None,
        "has_partition": partition is not None,
    }
    data = {
        "kind": "run",
        "curves": run_curves(run),
        "time": run_time(run),
        "weights": weights,
        "partition": partition,
    }
    return context, data


def facts(run: Run) -> list[tuple[str, str]]:
    """What the run was, in a few words."""
    ordinary = run.experiment.get("mode", "rounds") == "rounds"
    shown = (*FACTS, *(() if ordinary else FACTS_OF_MODES))
    idle = {"rule"} if run.rounds[-1].asynchronous else set()
    found = [(word, _at(run.experiment, key)) for word, key in shown if word not in idle]
    found.append(("device", run.environment.get("device")))
    return [(word, words.label(value)) for word, value in found if value is not None]


def _at(table: Mapping[str, Any], dotted: str) -> Any:
    """The value under a dotted key; a plug's table may be its bare name."""
    value: Any = table
    for key in dotted.split("."):
        if not isinstance(value, Mapping):
            return value
        value = value.get(key)
    return value


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """The figures that a reader looks for first: word, value, and a remark."""
    last = run.rounds[-1]
    best = best_accuracy(run)
    at = next((record.round for record in run.rounds if record.test_accuracy == best), None)
    spent = [seconds for seconds in map(total_seconds, run.rounds) if seconds is not None]
    sent = [count for count in map(total_bytes, run.rounds) if count is not None]
    shown = [
        ("final accuracy", words.fraction(last.test_accuracy), f"test loss {words.number(last.test_loss)}"),
        ("best accuracy", words.fraction(best), f"in round {at}"),
        ("rounds", str(len(run.rounds)), "all of them" if run.finished else f"of {run.planned}"),
    ]
    if spent:
        shown.append(("time", words.seconds(sum(spent)), f"{words.seconds(sum(spent) / len(spent))} a round"))
    if last.virtual_seconds is not None:
        a_round = last.virtual_seconds / len(run.rounds)
        shown.append(("virtual time", f"{words.amount(last.virtual_seconds)} s", f"{words.amount(a_round)} s a round"))
    if last.asynchronous is not None and last.asynchronous.updates is not None:
        staleness = words.amount(mean_staleness(record.model_dump(include={"asynchronous"}) for record in run.rounds))
        shown.append(("updates", f"{last.asynchronous.updates:,}", f"mean staleness {staleness}"))
    if sent:
        shown.append(("sent", words.size(sum(sent)), "up and down"))
    if last.attack_success is not None:
        shown.append(("attack success", words.fraction(last.attack_success), "in the last round"))
    share = byzantine_weight(run)
    if share is not None:
        shown.append(("Byzantine weight", words.percent(share), "of all, mean over rounds"))
    return shown


def notes(run: Run) -> list[str]:
    """What a reader has to know before believing the figures."""
    found = []
    if not run.finished:
        found.append(f"Not finished: {len(run.rounds)} of {run.planned} rounds.")
    if run.torn:
        found.append("The last line of metrics.jsonl is incomplete and was left out.")
    if not run.experiment:
        found.append("There is no experiment.toml, so the settings are not known.")
    return found


def weights_note(run: Run) -> str:
    """Why there is no picture of the weights, where there is none."""
    if any("coefficients" in record.model_fields_set for record in run.rounds):
        return "This rule gives no weight to a worker as a whole, and no worker was screened out."
    return "The run holds no record of the weights that workers had."


def rounds_table(run: Run) -> dict[str, Any]:
    """The table of rounds: head, rows, and how many rounds a row stands for."""
    columns = _columns(run)
    every = math.ceil(len(run.rounds) / MOST_ROWS)
    shown = [*run.rounds[:-1:every], run.rounds[-1]]
    return {
        "head": [name for name, _ in columns],
        "rows": [[read(record) for _, read in columns] for record in shown],
        "every": every,
        "rounds": len(run.rounds),
    }


def _columns(run: Run) -> list[tuple[str, Callable[[Round], str]]]:
    columns: list[tuple[str, Callable[[Round], str]]] = [
        ("round", lambda record: str(record.round)),
        ("test accuracy", lambda record: words.fraction(record.test_accuracy)),
        ("test loss", lambda record: words.number(record.test_loss)),
        ("train loss", lambda record: words.number(record.train_loss)),
    ]
    if any(record.attack_success is not None for record in run.rounds):
        columns.append(("attack success", lambda record: words.fraction(record.attack_success)))
    if any(record.virtual_seconds is not None for record in run.rounds):
        columns.append(("virtual s", lambda record: words.amount(record.virtual_seconds)))
    if any(record.asynchronous is not None for record in run.rounds):
        columns.append(("updates", lambda record: words.amount(record.asynchronous and record.asynchronous.updates)))
        columns.append(("staleness", lambda record: words.amount(record.staleness)))
    for phase in phases_of([run]):
        columns.append((phase.replace("_", " "), lambda record, phase=phase: words.seconds(record.seconds.get(phase))))
    columns += [
        ("bytes up", lambda record: words.size(record.bytes_up)),
        ("bytes down", lambda record: words.size(record.bytes_down)),
        ("cohort", lambda record: str(len(record.cohort))),
    ]
    if any(record.excluded for record in run.rounds):
        columns.append(("screened out", lambda record: ", ".join(map(str, record.excluded)) or words.MISSING))
    if any(record.lost for record in run.rounds):
        columns.append(("lost", lambda record: ", ".join(map(str, record.lost)) or words.MISSING))
    return columns
