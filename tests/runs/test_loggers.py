"""Loggers: when they begin and end, what they are told, what happens if they fail; and those of W&B and MLflow."""

from __future__ import annotations

import contextlib
import json
import struct

import pytest

import fedsim
from fedsim.comparison import plan_grid
from fedsim.errors import ExperimentError, FedsimWarning
from fedsim.loggers import LoggedRun, logger
from tests.commands import run_python

CALLS: list = []
GRID = {"local.lr": [0.1, 0.2], "seed": [0, 1]}
POINTS = [(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)]


@contextlib.contextmanager
def noted(run, *, fails_in: int = -1):
    """Notes its calls. It fails in a round, at its end (99), or as it begins (0)."""
    if fails_in == 0:
        raise OSError("no connection\nto the server")
    CALLS.append(run)
    try:
        yield lambda round, numbers: CALLS.append((round, dict(numbers))) if round != fails_in else 1 / 0
    except BaseException as error:
        CALLS.append(error)
        raise
    CALLS.append("finished")
    if fails_in == 99:
        raise OSError("no connection")


@pytest.fixture(autouse=True)
def no_calls():
    CALLS.clear()


def logging(tables, *loggers, **changes):
    return {**tables, "records.loggers": list(loggers), "checkpoint.every": 1, **changes}


def test_a_logger_is_told_of_the_run_and_of_each_round(tiny_experiment, tmp_path):
    result = fedsim.run(logging(tiny_experiment, noted), tmp_path / "run")
    run, *rounds, last = CALLS
    assert (run.name, run.group, run.folder) == ("run", result.experiment.name, tmp_path / "run")
    assert (run.resumed, run.done) == (False, 0)
    assert run.settings["local.lr"] == 0.05
    assert [round for round, _ in rounds] == [1, 2]
    assert rounds[1][1]["test/accuracy"] == result.test_accuracy
    assert last == "finished"


def test_a_logger_has_parameters_and_needs_no_folder(tiny_experiment):
    fedsim.run(logging(tiny_experiment, {"name": "tests.runs.test_loggers:noted", "fails_in": 7}))
    assert (CALLS[0].folder, CALLS[0].name, CALLS[-1]) == (None, CALLS[0].group, "finished")
    with pytest.raises(ExperimentError, match="fails = 1: unknown key .*fails_in"):
        fedsim.Experiment(**{"records": {"loggers": [{"name": noted, "fails": 1}]}})


def test_two_loggers_of_one_name_are_both_told(tiny_experiment):
    name = "tests.runs.test_loggers:noted"
    fedsim.run(logging(tiny_experiment, name, {"name": name, "fails_in": 7}))
    assert [type(each) for each in CALLS[:2]] == [LoggedRun, LoggedRun]
    assert [each if isinstance(each, str) else each[0] for each in CALLS[2:]] == [1, 1, 2, 2, "finished", "finished"]
    CALLS.clear()
    with pytest.warns(FedsimWarning, match="failed in round 1"):
        fedsim.run(logging(tiny_experiment, {"name": name, "fails_in": 1}, name))
    assert [each[0] for each in CALLS if isinstance(each, tuple)] == [1, 2]
    assert CALLS[-1] == "finished"


def test_a_resumed_run_has_the_id_of_its_first_part(tiny_experiment, tmp_path):
    tables = logging(tiny_experiment, noted)
    fedsim.run(tables, tmp_path / "run")
    fedsim.run({**tables, "rounds": 3}, tmp_path / "run", resume=True)
    first, second = (each for each in CALLS if hasattr(each, "id"))
    assert (second.id, second.resumed, second.done) == (first.id, True, 2)
    assert [each[0] for each in CALLS if isinstance(each, tuple)] == [1, 2, 3]
    assert json.loads((tmp_path / "run/environment.json").read_text())["logged_as"] == first.id


def test_loggers_may_be_changed_when_a_run_is_resumed(tiny_experiment, tmp_path):
    fedsim.run(logging(tiny_experiment), tmp_path / "run")
    for rounds in (3, 4):
        fedsim.run(logging(tiny_experiment, noted, rounds=rounds), tmp_path / "run", resume=True)
    first, second = (each for each in CALLS if hasattr(each, "id"))
    assert (first.resumed, second.resumed, first.id == second.id) == (False, True, True)


def test_a_logger_that_cannot_begin_ends_the_run_in_one_line(tiny_experiment, tmp_path):
    failing = {"name": "tests.runs.test_loggers:noted", "fails_in": 0}
    line = r'^records.loggers: "tests.\S+:noted" cannot begin: OSError: no connection to the server$'
    with pytest.raises(ExperimentError, match=line):
        fedsim.run(logging(tiny_experiment, {**failing, "fails_in": 7}, failing), tmp_path / "run")
    assert isinstance(CALLS[-1], ExperimentError), "the logger before it has ended"
    assert not (tmp_path / "run").exists()


def test_a_logger_that_fails_later_is_left_out_with_a_warning(tiny_experiment, tmp_path):
    failing = {"name": "tests.runs.test_loggers:noted", "fails_in": 2}
    with pytest.warns(FedsimWarning, match=r'the logger "\S+" failed in round 2: ZeroDivisionError: .*without it$'):
        result = fedsim.run(logging(tiny_experiment, failing, rounds=3), tmp_path / "run")
    assert len(result.history) == 3
    assert isinstance(CALLS[-1], ZeroDivisionError)
    CALLS.clear()
    with pytest.warns(FedsimWarning, match=r'the logger "\S+" failed at its end: OSError: no connection'):
        assert len(fedsim.run(logging(tiny_experiment, {**failing, "fails_in": 99})).history) == 2


def test_a_run_that_fails_ends_its_loggers_with_its_error(tiny_experiment):
    def on_round(record):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fedsim.run(logging(tiny_experiment, noted), on_round=on_round)
    assert isinstance(CALLS[-1], KeyError)


def test_each_run_of_a_comparison_is_logged_under_its_id(tiny_experiment, tmp_path):
    tables = logging(tiny_experiment, noted, rounds=1)
    fedsim.compare(tables, GRID, tmp_path / "grid", jobs=1)
    runs = [each for each in CALLS if hasattr(each, "id")]
    assert [run.name for run in runs] == [
        run.id for run in plan_grid(tables, {"local.lr": [0.1, 0.2], "seed": [0, 1]}).runs
    ]
    assert [(run.settings["local.lr"], run.settings["seed"]) for run in runs] == [
        (0.1, 0),
        (0.1, 1),
        (0.2, 0),
        (0.2, 1),
    ]
    assert len({run.group for run in runs}) == 1


def test_the_loggers_that_come_with_fedsim():
    assert logger.names() == ["tensorboard", "wandb", "mlflow"]
    table = fedsim.Experiment(records={"loggers": ["tensorboard"], "tensorboard": True}).records
    assert [each.name for each in table.all_loggers] == ["tensorboard"]
    assert [each.name for each in fedsim.Experiment(records={"tensorboard": True}).records.all_loggers] == [
        "tensorboard"
    ]
    with pytest.raises(ExperimentError, match='no such logger; did you mean "wandb"'):
        fedsim.Experiment(records={"loggers": ["wanb"]})


PROGRAM = """
import sys
import warnings
import fedsim

warnings.simplefilter("ignore")
tables = {"rounds": 2, "workers": 2, "model": "logistic", "engine": "serial", "local.steps": 1, "checkpoint.every": 1}
tables["records.loggers"] = [sys.argv[1]]
if __name__ == "__main__":
    result = fedsim.run(tables, "first")
    fedsim.run(tables, "first", resume=True, rounds=3)
    comparison = fedsim.compare(tables, {"local.lr": [0.1, 0.2], "seed": [0, 1]}, "grid", jobs=2)
    assert not comparison.failed, comparison.table
"""


def run_program(folder, name):
    """Three runs: one that is resumed, and a comparison of four in two processes."""
    (folder / "program.py").write_text(PROGRAM)
    done = run_python(folder / "program.py", name, cwd=folder)
    assert done.returncode == 0, done.stderr


def records_in(log):
    """The records of a log of LevelDB: in blocks of 32 KiB, parts with checksum, length, kind (1: whole, 4: last)."""
    place, record = 7, b""
    while place + 7 < len(log):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        length, kind = struct.unpack_from("<HB", log, place + 4)
        record += log[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


@pytest.mark.filterwarnings("ignore")
def test_wandb_has_the_rounds_of_all_runs(tmp_path):
    pytest.importorskip("wandb", exc_type=ImportError)
    from wandb.proto.wandb_internal_pb2 import Record

    run_program(tmp_path, "wandb")
    found, points = {}, {}
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in records_in(path.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run") and record.run.display_name:
                config = {each.key: json.loads(each.value_json) for each in record.run.config.update}
                steps = found.setdefault((record.run.display_name, record.run.run_id), [])
                points[record.run.display_name] = (config["local.lr"], config["seed"])
            if record.HasField("history"):
                items = {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
                assert 0 < items["test/accuracy"] <= 1
                steps.append(items["_step"])
    assert [steps for (name, _), steps in found.items() if name == "first"] == [[1, 2, 3]]
    del points["first"]
    assert sorted(points.values()) == POINTS
    assert [steps for (name, _), steps in found.items() if name != "first"] == [[1, 2]] * 4


@pytest.mark.filterwarnings("ignore")
def test_mlflow_has_the_rounds_of_all_runs(tmp_path):
    pytest.importorskip("mlflow", exc_type=ImportError)
    pytest.importorskip("sqlalchemy", reason="MLflow keeps its runs in SQLite")
    from mlflow import MlflowClient

    run_program(tmp_path, "mlflow")
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    place = client.get_experiment_by_name("fedsim").experiment_id
    runs = {run.info.run_name: run for run in client.search_runs([place])}
    assert len(runs) == 5
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    steps = [each.step for each in client.get_metric_history(runs["first"].info.run_id, "test/accuracy")]
    assert steps == [1, 2, 3]
    parameters = {
        (run.data.params["local.lr"], run.data.params["seed"]) for name, run in runs.items() if name != "first"
    }
    assert parameters == {("0.1", "0"), ("0.1", "1"), ("0.2", "0"), ("0.2", "1")}
