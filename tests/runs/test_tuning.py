from __future__ import annotations

import pytest

import fedsim
from fedsim.runs import tuning
from fedsim.runs.tuning import Candidate, tune


@pytest.fixture
def experiment(tiny_experiment):
    return fedsim.Experiment(**{**tiny_experiment, "engine": "auto", "processes": 1})


def test_each_way_is_measured(experiment):
    measured = []
    best = tune(experiment, measured.append)
    assert [candidate.label for candidate in measured] == ["engine=serial", "engine=batched processes=1"]
    assert all(candidate.round_seconds > 0 and candidate.start_seconds > 0 for candidate in measured)
    assert best in measured


def test_the_way_with_the_shortest_run_is_best_and_stacks_must_be_clearly_faster(experiment, monkeypatch):
    times = {"serial": (1.0, 0.0), "batched": (0.95, 0.0), "spawn": (0.5, 9.0)}
    monkeypatch.setattr(tuning, "_measure", lambda experiment, keys: Candidate(keys, *times[keys["engine"]]))
    wanted = experiment.model_copy(update={"processes": 2})
    for rounds, engine in ((2, "serial"), (10, "serial"), (30, "spawn")):
        assert tune(wanted.model_copy(update={"rounds": rounds})).keys["engine"] == engine
    times["batched"] = 0.8, 0.0
    assert tune(wanted).keys == {"engine": "batched", "processes": 1}


def test_a_way_that_is_refused_is_said_to_be_and_the_others_count(experiment):
    measured = []
    best = tune(
        experiment.model_copy(update={"model": fedsim.Experiment(model="tests.models:Stateful").model}), measured.append
    )
    assert best.keys == {"engine": "serial"}
    assert "cannot be stacked" in measured[1].refusal


@pytest.mark.parametrize(
    "changes",
    [
        {"sync": "gradients"},
        pytest.param({"sync": "post_local", "gradient_rounds": 1}, marks=pytest.mark.slow),  # both kinds of rounds
        {"mode": "clock", "policy": "asgd"},
        {"batched": {"width": 2}, "worker_retries": 1, "records": {"updates": [2]}},
        pytest.param({"local": {"steps": 3}}, marks=pytest.mark.slow),
        {"aggregate": lambda updates: updates.mean(0)},
    ],
)
def test_all_kinds_of_experiments_can_be_measured(changes, tiny_experiment):
    measured = []
    tune(fedsim.Experiment(**{**tiny_experiment, "engine": "auto", "processes": 1, **changes}), measured.append)
    assert [candidate.refusal for candidate in measured] == [None, None]


def test_a_race_cannot_be_tuned(tiny_experiment):
    with pytest.raises(fedsim.ExperimentError, match=r'mode = "race": fedsim tune compares'):
        tune(fedsim.Experiment(**{**tiny_experiment, "engine": "auto", "mode": "race", "policy": "hogwild"}))


def test_the_command_ends_with_lines_for_the_file(cli):
    done = cli("tune", "data=tests.plugs:tiny", "rounds=1", "workers=2", "processes=1")
    assert done.exit_code == 0
    table, lines = done.stdout.split("\n\n")
    assert "engine=serial" in table
    assert lines.splitlines()[0] in ('engine = "serial"', 'engine = "batched"')
