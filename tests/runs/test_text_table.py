"""What a run prints."""

from __future__ import annotations

import math

import pytest

import fedsim
from fedsim.callbacks.display import announcement, columns_of, headline, table_header, table_line
from fedsim.callbacks.records import draw_curve
from fedsim.records.record import RoundRecord

SYNCHRONOUS = "round  accuracy  test loss  train loss  pull_down s   train s  aggregate s    test s"
HEADS = {
    "sync": "round  accuracy  test loss  train loss  virtual s",
    "ssp": "round  accuracy  test loss  train loss  virtual s   updates  staleness",
}


def record(**more):
    phases = {"pull_down": 0.001, "train": 0.2794, "aggregate": 0.0, "test": 1.5}
    losses = {"round": 7, "test_loss": 1.22184, "test_accuracy": 0.745, "train_loss": 2.0249}
    return RoundRecord(**{**losses, "seconds": phases, **more})


def test_the_table_of_a_synchronous_run_has_its_phases():
    columns = columns_of(record())
    assert table_header(columns) == SYNCHRONOUS
    cells = ["7", "0.7450", "1.2218", "2.0249", "0.001", "0.279", "0.000", "1.500"]
    assert table_line(columns, record()).split() == cells
    assert len(table_line(columns, record())) == len(SYNCHRONOUS)


def test_the_table_of_a_run_on_the_clock_has_virtual_seconds_updates_and_staleness():
    assert table_header(columns_of(record(virtual_seconds=321.354))) == HEADS["sync"]
    work = {"updates": 1025, "arrivals": 1030, "staleness": {"1": 3, "4": 1}, "buffered": 0, "discarded": 0}
    busy = record(virtual_seconds=321.354, asynchronous=work)
    columns = columns_of(record(virtual_seconds=0.0, asynchronous={**work, "staleness": {}}))
    assert table_header(columns) == HEADS["ssp"]
    assert table_line(columns, busy).split()[4:] == ["321.4", "1025", "1.75"]
    idle = record(virtual_seconds=1.0, asynchronous={**work, "updates": 0, "staleness": {}})
    assert table_line(columns, idle).split()[-2:] == ["0", "-"]


def test_the_table_has_columns_for_a_few_metrics_of_plugs_and_shows_numbers_that_are_not_finite():
    first = record(metrics={f"m{number}": float(number) for number in range(9)}, test_loss=math.nan)
    columns = columns_of(first)
    assert table_header(columns).split()[-4:] == ["m0", "m1", "m2", "m3"]
    assert table_line(columns, first).split()[2] == "-"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, ": 3 workers; 2 rounds; weighted_mean of parameters"),
        ({"mode": "clock"}, "; weighted_mean of parameters on the virtual clock (equal speeds, constant noise)"),
        (
            {"mode": "clock", "policy": "ssp", "clock": {"noise": "lognormal", "speed": "linear"}},
            "; ssp (s = 3) on the virtual clock (linear speeds, lognormal noise)",
        ),
        ({"mode": "clock", "policy": "fedbuff", "cohort": 2}, "3 workers, 2 at a time; "),
        ({"cohort": 2}, "3 workers, 2 per round; "),
        ({"attack": {"name": "ipm", "workers": [1]}}, "3 workers, 1 of them Byzantine (ipm); "),
    ],
)
def test_the_first_line_names_mode_and_policy(tiny_experiment, change, words):
    assert words in announcement(fedsim.load_experiment({**tiny_experiment, **change}))


def test_the_headline_names_data_model_and_engine(tiny_experiment):
    lines = []
    fedsim.run({**tiny_experiment, "rounds": 1}, on_start=lambda prepared: lines.append(headline(prepared)))
    assert lines[0].startswith("tests.plugs:tiny (203 train, 90 test), 2nn (")
    assert lines[0].endswith("; 67 to 68 samples each (iid); serial on cpu")


def test_the_curve_has_a_panel_for_virtual_seconds_where_there_are_such():
    def labels(history):
        return [axes.get_xlabel() for axes in draw_curve(history, "x").axes]

    assert labels([record(round=1), record(round=2)]) == ["round", "round"]
    timed = [record(round=1, virtual_seconds=3.0), record(round=2, virtual_seconds=9.0)]
    assert labels(timed) == ["round", "round", "virtual seconds"]
    assert draw_curve(timed, "x").get_suptitle() == "x: test accuracy 0.7450 after 2 rounds"
