"""A result as a notebook shows it."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedsim.config.experiment import Experiment
from fedsim.core.input_limits import leaves_of
from fedsim.errors import show
from fedsim.records.formatting import score_text
from fedsim.records.record import RoundRecord
from fedsim.runs.notebook import figure_html
from fedsim.runs.text_table import columns_of, draw_curve, table_cell

if TYPE_CHECKING:
    from fedsim.runs.run import Result


def result_html(result: Result) -> str:
    """The name, the settings that are not the defaults, the numbers of the last round, and the curve."""
    last = result.history[-1]
    parts = [f"<h4>{html.escape(result.experiment.name)}: {html.escape(score_text(last))}</h4>"]
    if result.stopped:
        parts.append(f"<p>Stopped after round {last.round}: {html.escape(result.stopped)}</p>")
    if changed := changed_settings(result.experiment):
        items = ", ".join(f"<code>{html.escape(line)}</code>" for line in changed)
        parts.append(f"<p>Settings: {items}</p>")
    curve = figure_html(draw_curve(result.history, result.experiment.name), "curves of the run")
    return "".join([*parts, _last_round(last), curve])


def changed_settings(experiment: Experiment) -> Sequence[str]:
    """`local.lr = 0.1` for each setting that is not the default one."""
    defaults = dict(leaves_of(Experiment().resolved()))
    given = leaves_of(experiment.resolved())
    return [f"{key} = {show(value)}" for key, value in given if key != "name" and defaults.get(key) != value]


def _last_round(record: RoundRecord) -> str:
    columns = [column for column in columns_of(record) if column.path[0] != "seconds"]
    heads = "".join(f"<th>{html.escape(column.column)}</th>" for column in columns)
    cells = "".join(f"<td>{html.escape(table_cell(column, record))}</td>" for column in columns)
    return f"<table><thead><tr>{heads}</tr></thead><tbody><tr>{cells}</tr></tbody></table>"
