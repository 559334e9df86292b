"""What a run prints."""

from __future__ import annotations

import pytest

import fedsim
from fedsim.report import columns_of, draw_curve, headline, table_header, table_line

SYNCHRONOUS = "round  test loss  accuracy  train loss  pull_down s      train s  aggregate s       test s"
HEADS = {
    "sync": "round  test loss  accuracy  train loss    virtual s",
    "ssp": "round  test loss  accuracy  train loss    virtual s    updates  staleness",
}


def record(**more):
    phases = {"pull_down": 0.001, "train": 0.2794, "aggregate": 0.0, "test": 1.5}
    losses = {"round": 7, "test_loss": 1.22184, "test_accuracy": 0.745, "train_loss": 2.0249}
    return {**losses, "seconds": phases, "virtual_seconds": None, "asynchronous": None, **more}


def test_the_table_of_a_synchronous_run_has_its_phases():
    columns = columns_of(fedsim.Experiment())
    assert table_header(columns) == SYNCHRONOUS
    line = "    7     1.2218    0.7450      2.0249        0.001        0.279        0.000        1.500"
    assert table_line(columns, record()) == line


@pytest.mark.parametrize("policy", HEADS)
def test_the_table_of_a_run_on_the_clock_has_virtual_seconds_and_what_is_asynchronous(policy):
    columns = columns_of(fedsim.Experiment(mode="clock", policy=policy))
    assert table_header(columns) == HEADS[policy]
    work = {"updates": 1025, "trips": 1030, "staleness": {"1": 3, "4": 1}, "held": 0, "wasted": 0}
    numbers = table_line(columns, record(virtual_seconds=321.354, asynchronous=work)).split()
    assert numbers[4:] == (["321.4"] if policy == "sync" else ["321.4", "1025", "1.75"])
    idle = {**work, "staleness": {}}
    assert table_line(columns, record(virtual_seconds=0.0, asynchronous=idle)).split()[4] == "0.0"


def test_where_nothing_was_applied_there_is_no_staleness():
    columns = columns_of(fedsim.Experiment(mode="clock", policy="asgd"))
    work = {"updates": 0, "trips": 1, "staleness": {}, "held": 1, "wasted": 0}
    assert table_line(columns, record(virtual_seconds=1.0, asynchronous=work)).split()[-1] == "-"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, "(iid); weighted_mean of parameters; serial on cpu"),
        ({"mode": "clock"}, "; weighted_mean of parameters on the virtual clock (equal speeds, constant noise); "),
        (
            {"mode": "clock", "policy": "ssp", "clock": {"noise": "lognormal", "speed": "linear"}},
            "; ssp (s = 3) on the virtual clock (linear speeds, lognormal noise); ",
        ),
        ({"mode": "clock", "policy": "fedbuff", "cohort": 2}, "3 workers, 2 at a time, "),
        ({"cohort": 2}, "3 workers, 2 per round, "),
        ({"attack": {"name": "ipm", "workers": [1]}}, "3 workers, 1 of them Byzantine (ipm), "),
    ],
)
def test_the_headline_names_mode_and_policy(tiny_experiment, change, words):
    lines = []
    fedsim.run({**tiny_experiment, "rounds": 1, **change}, on_start=lambda setting: lines.append(headline(setting)))
    assert words in lines[0]


def test_the_curve_has_a_panel_for_virtual_seconds_where_there_are_such():
    def labels(history):
        return [axes.get_xlabel() for axes in draw_curve(history, "x").axes]

    assert labels([record(round=1), record(round=2)]) == ["round", "round"]
    timed = [record(round=1, virtual_seconds=3.0), record(round=2, virtual_seconds=9.0)]
    assert labels(timed) == ["round", "round", "virtual seconds"]


@pytest.mark.parametrize(("rounds", "words"), [(1, "0.7450 after 1 round"), (2, "0.7450 after 2 rounds")])
def test_the_title_of_a_curve_counts_rounds(rounds, words):
    figure = draw_curve([record(round=round) for round in range(1, rounds + 1)], "x")
    assert figure.get_suptitle().endswith(words)
