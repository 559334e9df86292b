"""Early stopping: when a run ends, what it records, and its effect on resuming and comparing."""

from __future__ import annotations

import contextlib
import json
import math

import pytest
import torch

import fedsim
from fedsim import ExperimentError
from fedsim.config.schema import Stop
from fedsim.records.early_stopping import stop_reason
from fedsim.records.reader import Run
from fedsim.records.record import RoundRecord
from tests.waves import in_waves

SMALL = {"rounds": 8, "workers": 2, "model": "logistic", "engine": "serial", "records.figures": []}
# A step of this size changes no float32 parameter, so the result does not improve after round 1.
STANDING = {**SMALL, "model": "2nn", "local": {"lr": 1e-30}, "data.validation_fraction": 0.2, "stop": {"patience": 2}}


def history_of(*losses):
    return [RoundRecord(round=round, test_loss=loss, cohort=[0]) for round, loss in enumerate(losses, start=1)]


@pytest.mark.parametrize(
    ("settings", "losses", "ends"),
    [
        ({"patience": 2}, [3.0, 2.0, 2.0, 1.0], None),
        ({"patience": 2}, [3.0, 2.0, 2.5, 2.0], 4),
        ({"patience": 1, "min_delta": 0.5}, [3.0, 2.0, 1.6], 3),
        ({"patience": 2}, [float("nan"), None], 2),
        ({"patience": 2}, [1.0, float("nan"), 2.0], 3),
        ({"target": 1.5}, [3.0, 2.0, 1.5], 3),
        ({"target": 1.5, "mode": "max"}, [1.0, 1.2, 2.0], 3),
    ],
)
def test_a_run_ends_after_the_round_that_decides_it(settings, losses, ends):
    stop, history = Stop(metric="test_loss", **settings), history_of(*losses)
    rounds = [record.round for record in history if stop_reason(history[: record.round], stop)]
    assert rounds == ([] if ends is None else [ends])


@pytest.mark.parametrize("nothing", [None, math.nan])
def test_rounds_without_a_cohort_have_no_train_loss_and_do_not_count(nothing):
    """A round with a cohort counts even if its loss is not finite (null in the file)."""
    rounds = [(1.0, [0]), (nothing, []), (nothing, []), (1.0, [0]), (nothing, []), (nothing, [0])]
    history = [RoundRecord(round=k, train_loss=loss, cohort=cohort) for k, (loss, cohort) in enumerate(rounds, start=1)]
    stop = Stop(metric="train_loss", patience=2)
    assert [len(history[:k]) for k in range(1, 7) if stop_reason(history[:k], stop)] == [6]


@pytest.mark.parametrize(
    ("rounds", "intervals", "ends"),
    [
        ([{"cohort": [0]}] * 6, (3,), 6),
        ([{"cohort": [0]}, {}, {}, {"cohort": [0]}], (), 4),
        ([{"cohort": [0]}, {}, {}, {}], (2,), None),
        ([{"cohort": [0]}, {"metrics": {"epsilon": 1.0}}], (), 2),  # the server has added noise
        ([{"asynchronous": {"updates": updates}} for updates in (1, 1, 1, 2)], (), 4),
    ],
)
def test_rounds_in_which_the_global_model_cannot_change_do_not_count(rounds, intervals, ends):
    history = [RoundRecord(round=k, test_loss=1.0, **values) for k, values in enumerate(rounds, start=1)]
    stop = Stop(metric="test_loss", patience=1)
    stops = [k for k in range(1, len(history) + 1) if stop_reason(history[:k], stop, *intervals)]
    assert stops == ([] if ends is None else [ends])


IN_GROUPS = {"workers": 4, "groups": 2, "group_rounds": 3, "rounds": 9}
STOPPED = {
    "loss with groups": ({**IN_GROUPS, "stop": {"metric": "test_loss", "patience": 1, "min_delta": 9.0}}, 6),
    "train loss with groups": ({**IN_GROUPS, "stop": {"metric": "train_loss", "target": 9.0}}, 3),
    "workers with groups": ({**IN_GROUPS, "stop": {"metric": "worker_loss", "target": 9.0}}, 6),
    "request with groups": (IN_GROUPS, 6),
    "several global models": ({"local": {"algorithm": "ifca", "k": 2}, "cohort": 2}, 4),
    "gradients, then parameters": ({"sync": "post_local", "switch_after_round": 4}, 4),
    "clock": ({"mode": "clock", "stop": {"metric": "train_loss", "target": 9.0}}, 1),
    "buffered updates": (
        {
            **{"mode": "clock", "policy": {"name": "fedbuff", "k": 7}},
            "stop": {"metric": "test_loss", "patience": 1, "min_delta": 9.0},
        },
        5,
    ),
    "waves": ({"stop": {"metric": "test_loss", "target": 9.0}}, 1),
}


@pytest.mark.parametrize("case", STOPPED)
def test_a_run_that_stops_returns_the_model_of_its_last_record(case, tiny_experiment, tmp_path):
    tables, ends = STOPPED[case]
    tables = {**tiny_experiment, "rounds": 8, "records.figures": [], **tables}
    if "workers" in case:
        data = {"name": "tests.components:tiny", "local_test_fraction": 0.2}
        tables |= {"data": data, "worker_evaluation.every": 2}
    with in_waves() if case == "waves" else contextlib.nullcontext():
        result = fedsim.run(tables, tmp_path / "run", on_round=None if "stop" in tables else stop_after(4))
    assert fedsim.load_run(tmp_path / "run", allow_imports=True).stopped == result.stopped
    assert (len(result.history), result.stopped is None) == (ends, False)
    test = fedsim.load_dataset("tests.components:tiny")[1].to(torch.device("cpu"), torch.float32)
    inputs, targets = test.gather(torch.arange(len(test)))
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(result.model(inputs), targets)
    assert loss.item() == pytest.approx(result.test_loss, rel=1e-5)
    if case != "waves":
        assert torch.equal(result.global_row, fedsim.run({**tables, "rounds": ends, "stop": {}}).global_row)


@pytest.mark.parametrize("mode", [{}, {"mode": "clock"}, {"mode": "clock", "policy": "asgd"}])
def test_a_stopped_run_records_its_reason_and_stays_finished(mode, tiny_experiment, tmp_path, capsys):
    tables = {**tiny_experiment, **STANDING, **mode}
    result = fedsim.run(tables, tmp_path / "run", progress=True)
    assert len(result.history) == 3
    assert "stopped after round 3 of 8: validation_accuracy has not improved for 2 rounds" in capsys.readouterr().out
    event = json.loads((tmp_path / "run/events.jsonl").read_text())
    assert event == {"event": "stopped", "round": 3, "reason": result.stopped}
    assert Run.read(tmp_path / "run").finished
    again = fedsim.run(tables, tmp_path / "run", resume=True, progress=True)
    assert "this run is finished: validation_accuracy" in capsys.readouterr().out
    assert [record.test_loss for record in again.history] == [record.test_loss for record in result.history]
    assert len((tmp_path / "run/events.jsonl").read_text().splitlines()) == 1


def interrupt_after_2(record):
    if record.round == 2:
        raise ZeroDivisionError


def test_an_interrupted_run_stops_in_the_same_round(tiny_experiment, tmp_path):
    tables = {**tiny_experiment, **STANDING, "checkpoint.every": 1}
    with pytest.raises(ZeroDivisionError):
        fedsim.run(tables, tmp_path, on_round=interrupt_after_2)
    assert len(fedsim.run(tables, tmp_path, resume=True).history) == 3


def test_a_comparison_has_runs_of_different_lengths(tiny_experiment, tmp_path):
    tables = {**tiny_experiment, **STANDING, "rounds": 4}
    plan = {"local.lr": [1e-30, 0.1], "seed": [0, 1]}
    compared = fedsim.compare(tables, plan, tmp_path)
    assert [len(run.history) for run in compared.runs][:2] == [3, 3]
    assert all(run.error is None for run in compared.runs)
    assert len(fedsim.compare(tables, plan, tmp_path).runs) == 4  # all runs are finished already


def test_a_run_can_stop_on_a_metric(tiny_experiment):
    stop = {"metric": "metrics.validation_top_k", "mode": "max", "target": 0.0}
    result = fedsim.run(
        {**tiny_experiment, **SMALL, "data.validation_fraction": 0.2, "metrics": ["top_k"], "stop": stop}
    )
    assert len(result.history) == 1


@pytest.mark.parametrize(
    ("stop", "words"),
    [
        ({"patience": 2}, "data.validation_fraction"),
        ({"metric": "accuracy", "target": 0.5}, "test_accuracy"),
        ({"metric": "metrics.top_k", "target": 0.5}, "stop.mode"),
        ({"metric": "metrics.top_k", "mode": "max", "target": 0.5}, "was not recorded in round 1"),
    ],
)
def test_a_wrong_table_is_refused(stop, words, tiny_experiment):
    with pytest.raises(ExperimentError, match=words):
        fedsim.run({**tiny_experiment, **SMALL, "stop": stop})


PERSONAL = {
    "local": {"lr": 0.1, "algorithm": "local_only"},
    "data": {"name": "tests.components:tiny", "local_test_fraction": 0.25},
}
BY_PERSONAL = {"metric": "worker_accuracy", "target": 0.0}


@pytest.mark.parametrize(
    ("stop", "changes"),
    [
        ({"metric": "test_loss", "patience": 2}, {}),
        ({"patience": 2}, {"data.validation_fraction": 0.2}),
        ({"metric": "metrics.top_k", "mode": "max", "patience": 2}, {"metrics": ["top_k"]}),
        ({"metric": "metrics.global_worker_loss_mean", "mode": "min", "patience": 2}, {}),
        ({"metric": "test_loss", "patience": 2}, {"local": {"algorithm": "fedper", "personal": ["*.weight"]}}),
    ],
)
def test_a_global_model_of_which_a_part_is_never_trained_ends_no_run(stop, changes, tiny_experiment):
    with pytest.raises(
        ExperimentError, match=r"^stop.metric = .* workers use different global models; use stop.metric=worker_accuracy"
    ):
        fedsim.run({**tiny_experiment, **SMALL, **PERSONAL, "stop": stop, **changes})


def test_personal_models_and_the_train_loss_end_runs_with_personal_parameters(tiny_experiment):
    tables = {**tiny_experiment, **SMALL, **PERSONAL, "worker_evaluation.every": 2}
    assert len(fedsim.run({**tables, "stop": BY_PERSONAL}).history) == 2
    assert len(fedsim.run({**tables, "stop": {"metric": "train_loss", "target": 1e9}}).history) == 1


def test_a_race_does_not_stop_early():
    with pytest.raises(ExperimentError, match="stop: does not work with mode=race"):
        fedsim.Experiment(mode="race", policy="hogwild", stop={"metric": "test_loss", "target": 1.0})


@pytest.mark.parametrize("changes", [{}, {"engine": "processes", "processes": 2}])
def test_a_run_that_stops_tests_its_workers_at_its_end(changes, tiny_experiment, tmp_path):
    data = {"name": "tests.components:tiny", "local_test_fraction": 0.25}
    tables = {**tiny_experiment, **SMALL, "data": data, "stop": {"metric": "test_loss", "target": 1e9}, **changes}
    result = fedsim.run(tables, tmp_path / "run")
    whole = fedsim.run({**tables, "rounds": 1, "stop": {}})
    assert len(result.history) == 1
    assert "global_worker_accuracy_mean" in result.history[0].metrics
    assert result.history[0].metrics == whole.history[0].metrics
    assert (tmp_path / "run/workers-00001.csv").exists()
    assert Run.read(tmp_path / "run").history[-1].metrics == whole.history[0].metrics


@pytest.mark.usefixtures("pictures")
def test_a_resumed_run_that_stops_tests_its_workers_at_its_end(tiny_experiment, tmp_path):
    data = {"name": "tests.components:tiny", "local_test_fraction": 0.25}
    tables = {**tiny_experiment, **SMALL, "data": data, "checkpoint.every": 1, "worker_evaluation": {"every": 5}}
    tables["stop"] = {"metric": "test_loss", "target": 1e-9}
    with pytest.raises(ZeroDivisionError):
        fedsim.run(tables, tmp_path, on_round=interrupt_after_2)
    tables["stop"] = {"metric": "test_loss", "target": 1e9}
    resumed = fedsim.run(tables, tmp_path, resume=True)
    assert len(resumed.history) == 1, "no round follows the checkpoint, whose result reaches the target"
    assert "global_worker_accuracy_mean" in resumed.history[-1].metrics
    assert (tmp_path / "workers-00001.csv").exists()
    fedsim.run({**tables, "records.figures": ["svg"]}, tmp_path, resume=True)
    assert (tmp_path / "workers.svg").exists(), "the stored results are drawn"


def stop_after(last):
    def on_round(record):
        if record.round == last:
            raise fedsim.StopRun("enough")

    return on_round


def test_on_round_ends_a_run_whose_result_and_records_are_whole(tiny_experiment, tmp_path, capsys):
    tables = {**tiny_experiment, "rounds": 5, "checkpoint": {"every": 1}}
    result = fedsim.run(tables, tmp_path / "run", on_round=stop_after(2), progress=True)
    assert "stopped after round 2 of 5: enough" in capsys.readouterr().out
    assert (len(result.history), result.stopped) == (2, "enough")
    assert (tmp_path / "run/model.safetensors").is_file()
    assert torch.equal(result.global_row, fedsim.run({**tables, "rounds": 2}).global_row)
    whole = fedsim.run(tables, tmp_path / "run", resume=True)
    assert (len(whole.history), whole.stopped) == (5, None)
    assert torch.equal(whole.global_row, fedsim.run(tables).global_row)


def test_only_stop_run_of_on_round_ends_a_run_and_its_session_goes_on(tiny_experiment, session):
    fedsim.run(tiny_experiment, session=session, on_round=stop_after(1))
    assert len(fedsim.run(tiny_experiment, session=session).history) == 2


def test_a_value_that_on_round_returns_does_not_end_the_run(tiny_experiment):
    assert len(fedsim.run(tiny_experiment, on_round=lambda record: True).history) == 2
