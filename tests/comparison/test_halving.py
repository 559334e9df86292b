"""Successive halving along the axis that is tuned: which values get more rounds, and what is recorded of the others."""

from __future__ import annotations

import csv

import pytest

import fedsim
from fedsim.comparison import plan_grid
from fedsim.comparison.folder import Shard
from fedsim.comparison.grid_terminal import Callback
from fedsim.comparison.runner import run_grid
from fedsim.errors import ExperimentError
from fedsim.records.comparison_settings import ComparisonSettings
from fedsim.records.history import read_history

RATES = [1e-6, 0.1, 1e-5, 0.05]  # the first and the third learn nothing
SETTINGS = ComparisonSettings(tune="local.lr", rounds_by_halving=True)


@pytest.fixture
def tables(serial):
    """An experiment of 8 rounds whose learning rate depends on the number of rounds, and whose rows have momentum."""
    local = {"batch_size": 16, "momentum": 0.9, "schedule": "cosine"}
    data = {"dataset": "tests.plugs:tiny", "validation": 0.2}
    return {**serial, "rounds": 8, "data": data, "local": local, "records": {"figures": []}}


def halved(tables, axes, out, **settings):
    return fedsim.compare(tables, axes, out, 1, tune="local.lr", rounds_by_halving=True, **settings)


def numbers(run):
    return [(record.round, record.test_loss, record.validation_loss, record.train_loss) for record in run.history]


def rows(path):
    return list(csv.DictReader(path.read_text().splitlines()))


def test_the_better_half_goes_on_and_has_the_bits_of_a_run_without_a_pause(tables, tmp_path):
    axes = {"local.lr": RATES, "seed": [0, 1]}
    half, full = halved(tables, axes, tmp_path / "half"), fedsim.compare(tables, axes, jobs=1, tune="local.lr")
    done = {rate: {len(run.history) for run in half.runs if run.point["local.lr"] == rate} for rate in RATES}
    assert done[1e-6] == done[1e-5] == {2}
    assert sorted([done[0.1], done[0.05]], key=min) == [{4}, {8}]
    for ours, theirs in zip(half.runs, full.runs, strict=True):
        assert numbers(ours) == numbers(theirs)[: len(ours.history)]
    assert not half.failed
    assert "28 of 64 rounds were not run" not in full.table
    assert "successive halving of local.lr: 32 of 64 rounds were not run" in half.table


def test_files_say_after_how_many_rounds_a_value_was_stopped(tables, tmp_path):
    halved(tables, {"local.lr": [1e-6, 0.1]}, tmp_path / "half")
    of_runs, tuned = rows(tmp_path / "half" / "results.csv"), rows(tmp_path / "half" / "tuning.csv")
    assert [(run["stopped_at"], run["error"], bool(run["test_loss"])) for run in of_runs] == [
        ("4", "", False),
        ("", "", True),
    ]
    assert [(value["rounds"], value["failed"], value["chosen"]) for value in tuned] == [
        ("4", "0", ""),
        ("8", "0", "yes"),
    ]
    assert all(value["validation"] for value in tuned)
    assert fedsim.load_comparison(tmp_path / "half", allow_imports=True).runs[0].stopped_at == 4


class Interrupting(Callback):
    """Ends the comparison after so many rounds."""

    def __init__(self, rounds):
        self.left = rounds

    def on_round(self, run, record):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt


@pytest.mark.parametrize("after", [1, 8, 11])
def test_an_interrupted_comparison_continues_with_the_same_decisions(after, tables, tmp_path):
    axes = {"local.lr": RATES}
    expected = halved(tables, axes, tmp_path / "whole")
    grid = plan_grid(tables, axes, (), SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        run_grid(grid, tmp_path / "broken", 1, Interrupting(after))
    again = run_grid(grid, tmp_path / "broken", 1)
    assert list(map(numbers, again.runs)) == list(map(numbers, expected.runs))
    assert again.table == expected.table


def test_runs_that_are_there_count_as_they_are(tables, tmp_path):
    axes = {"local.lr": [1e-6, 0.1]}
    full = fedsim.compare(tables, axes, tmp_path / "grid", 1, tune="local.lr")
    half = halved(tables, axes, tmp_path / "grid")
    assert [run.stopped_at for run in half.runs] == [None, None]
    assert list(map(numbers, half.runs)) == list(map(numbers, full.runs))


def test_without_halving_the_stopped_runs_continue(tables, tmp_path):
    axes = {"local.lr": [1e-6, 0.1]}
    halved(tables, axes, tmp_path / "grid")
    full = fedsim.compare(tables, axes, tmp_path / "grid", 1, tune="local.lr", rounds_by_halving=False)
    assert [len(run.history) for run in full.runs] == [8, 8]
    assert full.table == fedsim.compare(tables, axes, jobs=1, tune="local.lr").table


def test_a_value_with_a_failed_run_loses(tables, tmp_path, capsys):
    result = halved(tables, {"local.lr": [3e38, 0.1], "seed": [0, 1]}, tmp_path / "grid", progress=True)
    assert capsys.readouterr().out.count(": failed: ") == len(result.failed) > 0
    assert [row.chosen for row in result.summary] == [{"local.lr": 0.1}]
    assert [len(run.history) for run in result.runs if run.point["local.lr"] == 0.1] == [8, 8]


def test_a_run_that_fails_later_changes_no_earlier_decision(tables, tmp_path):
    tables["local"]["schedule"] = {"name": "multi_step", "milestones": [5], "gamma": 1e39}
    result = halved(tables, {"local.lr": RATES}, tmp_path / "grid")
    assert sorted(len(run.history) for run in result.runs) == [2, 2, 4, 5]
    assert [len(run.history) for run in result.failed] == [5]
    assert [run.stopped_at for run in result.runs if run.error is None] == [2, 4, 2]


def test_the_worst_case_decides_and_all_cases_of_a_value_go_on(tables, tmp_path):
    attack = {"workers": [0], "name": "sign_flipping"}
    axes = {"attack.name": ["none", "sign_flipping"], "local.lr": [1e-6, 0.1]}
    result = halved({**tables, "workers": 5, "attack": attack}, axes, tmp_path / "grid", worst="attack.name")
    lengths = {}
    for run in result.runs:
        lengths.setdefault(run.point["local.lr"], []).append(len(run.history))
    assert sorted(lengths.values()) == [[4, 4], [8, 8]]


def test_several_jobs_make_the_same_decisions(tables, tmp_path):
    del tables["engine"]
    axes = {"local.lr": RATES}
    one = halved({**tables, "engine": "serial"}, axes, tmp_path / "one")
    two = fedsim.compare(tables, axes, tmp_path / "two", 2, tune="local.lr", rounds_by_halving=True)
    assert list(map(numbers, two.runs)) == list(map(numbers, one.runs))


def test_a_shard_has_whole_groups_and_shards_are_merged(cli, tables, tmp_path):
    axes = {"aggregate.rule": ["mean", "median", "krum"], "local.lr": [1e-6, 0.1], "seed": [0, 1]}
    grid = plan_grid({**tables, "workers": 5, "rounds": 4}, axes, (), SETTINGS)
    for index in range(2):
        shard = Shard(index, 2)
        rules = {run.point["aggregate.rule"] for run in shard.of(grid)}
        assert rules == ({"mean", "krum"} if index == 0 else {"median"})
        assert len(shard.of(grid)) == 4 * len(rules)
        run_grid(grid, shard.folder(tmp_path / "grid"), 1, shard=shard)
    merged = cli("compare", "grid", "--allow-imports")
    assert merged.exit_code == 0
    assert "12 of 48 rounds were not run" in merged.stdout
    assert [len(read_history(tmp_path / "grid" / "runs" / run.id)) for run in grid.runs] == [2, 2, 4, 4] * 3


def test_the_command_says_which_runs_were_stopped(cli, tmp_path):
    words = ["rounds=2", "model=logistic", "workers=3", "data=tests.plugs:tiny", "data.validation=0.2", "engine=serial"]
    ended = cli("compare", *words, "--tune", "local.lr=1e-6,0.1", "--rounds-by-halving", "--out", "grid")
    assert ended.exit_code == 0
    assert ": stopped by halving after 1 of 2 rounds" in ended.stdout
    assert cli("report", "grid").exit_code == 0
    assert "Stopped by successive halving, or not finished: 1 of 2 runs" in (tmp_path / "grid/report.html").read_text()


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"tune": None}, "rounds_by_halving = true: needs tune"),
        ({"checkpoint": {"every": 0}}, {}, "rounds_by_halving = true: continues runs from checkpoints"),
        ({}, {"rounds_by_halving": "yes"}, 'rounds_by_halving = "yes": must be true or false'),
    ],
)
def test_halving_that_is_impossible_is_refused(changes, settings, message, tables):
    asked = ComparisonSettings(**{"tune": "local.lr", "rounds_by_halving": True} | settings)
    with pytest.raises(ExperimentError, match=message):
        plan_grid({**tables, **changes}, {"local.lr": RATES}, (), asked)
