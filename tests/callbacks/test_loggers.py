"""Loggers: when they begin and end, what they receive, and what happens if they fail; also W&B and MLflow."""

from __future__ import annotations

import contextlib
import json
import struct
import sys
import threading

import pytest

import fedsim
from fedsim.callbacks.loggers import scalars
from fedsim.errors import ExperimentError, FedsimWarning, MissingPackageError
from fedsim.loggers import LoggedRun, logger
from fedsim.records.record import AsyncRecord, RoundRecord
from tests.commands import run_python

CALLS: list = []
POINTS = [(0.1, 0), (0.1, 1), (0.2, 0), (0.2, 1)]


@contextlib.contextmanager
def noted(run, *, fails_in: int = -1):
    """A logger that records its calls. It fails in round `fails_in`, at its end (99) or at its start (0)."""
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


def test_a_logger_receives_the_run_and_each_round(tiny_experiment, tmp_path):
    result = fedsim.run(logging(tiny_experiment, noted), tmp_path / "run")
    run, *rounds, last = CALLS
    assert (run.name, run.group, run.folder) == ("run", result.experiment.name, tmp_path / "run")
    assert (run.resumed, run.done) == (False, 0)
    assert run.settings["local.lr"] == 0.05
    assert [round for round, _ in rounds] == [1, 2]
    assert rounds[1][1]["test/accuracy"] == result.test_accuracy
    assert last == "finished"


def test_a_logger_stays_in_the_process_that_writes_the_records(tiny_experiment):
    class Connected:
        def __init__(self):
            self.lock, self.rounds = threading.Lock(), []  # a lock can be neither copied nor sent to another process

        @contextlib.contextmanager
        def __call__(self, run):
            yield lambda round, numbers: self.rounds.append(round)

    connected = Connected()
    fedsim.run(logging(tiny_experiment, connected))
    assert connected.rounds == [1, 2]


def test_a_logger_has_parameters_and_needs_no_folder(tiny_experiment):
    fedsim.run(logging(tiny_experiment, {"name": "tests.callbacks.test_loggers:noted", "fails_in": 7}))
    assert (CALLS[0].folder, CALLS[0].name, CALLS[-1]) == (None, CALLS[0].group, "finished")
    with pytest.raises(ExperimentError, match="fails = 1: unknown key .*fails_in"):
        fedsim.Experiment(**{"records": {"loggers": [{"name": noted, "fails": 1}]}})


def test_two_loggers_of_one_name_both_receive_the_rounds(tiny_experiment):
    name = "tests.callbacks.test_loggers:noted"
    fedsim.run(logging(tiny_experiment, name, {"name": name, "fails_in": 7}))
    assert [type(each) for each in CALLS[:2]] == [LoggedRun, LoggedRun]
    assert [each if isinstance(each, str) else each[0] for each in CALLS[2:]] == [1, 1, 2, 2, "finished", "finished"]
    CALLS.clear()
    with pytest.warns(FedsimWarning, match="failed in round 1"):
        fedsim.run(logging(tiny_experiment, {"name": name, "fails_in": 1}, name))
    assert [each[0] for each in CALLS if isinstance(each, tuple)] == [1, 2]
    assert CALLS[-1] == "finished"


def test_a_resumed_run_has_the_id_of_its_first_part_with_loggers(tiny_experiment, tmp_path):
    for rounds, loggers in enumerate([[], [noted], [noted]], start=1):
        fedsim.run(logging(tiny_experiment, *loggers, rounds=rounds), tmp_path / "run", resume=True)
    first, second = (each for each in CALLS if hasattr(each, "id"))
    assert (first.resumed, second.resumed, second.done, second.id) == (False, True, 2, first.id)
    assert [each[0] for each in CALLS if isinstance(each, tuple)] == [2, 3]
    assert json.loads((tmp_path / "run/environment.json").read_text())["logged_as"] == first.id


def no_context(run):
    return None


def test_a_logger_that_is_no_context_manager_is_refused_in_one_line(tiny_experiment):
    line = "cannot start: TypeError: it must return a context manager, not None$"
    with pytest.raises(ExperimentError, match=line):
        fedsim.run(logging(tiny_experiment, {"name": "tests.callbacks.test_loggers:no_context"}))


def test_a_logger_that_cannot_begin_ends_the_run_in_one_line(tiny_experiment, tmp_path):
    failing = {"name": "tests.callbacks.test_loggers:noted", "fails_in": 0}
    line = r'^records.loggers: the logger "tests.\S+:noted" cannot start: OSError: no connection to the server$'
    with pytest.raises(ExperimentError, match=line):
        fedsim.run(logging(tiny_experiment, {**failing, "fails_in": 7}, failing), tmp_path / "run")
    assert isinstance(CALLS[-1], ExperimentError), "the previous logger has ended"
    assert not (tmp_path / "run").exists()


def test_a_logger_that_fails_later_is_left_out_with_a_warning(tiny_experiment, tmp_path):
    failing = {"name": "tests.callbacks.test_loggers:noted", "fails_in": 2}
    with pytest.warns(FedsimWarning, match=r'the logger "\S+" failed in round 2: Zero.*without this logger$'):
        result = fedsim.run(logging(tiny_experiment, failing, rounds=3), tmp_path / "run")
    assert len(result.history) == 3
    assert isinstance(CALLS[-1], ZeroDivisionError)
    CALLS.clear()
    with pytest.warns(FedsimWarning, match=r'the logger "\S+" failed at the end of the run: OSError: no connection'):
        assert len(fedsim.run(logging(tiny_experiment, {**failing, "fails_in": 99})).history) == 2


def test_a_run_that_fails_ends_its_loggers_with_its_error(tiny_experiment):
    with pytest.raises(ZeroDivisionError):
        fedsim.run(logging(tiny_experiment, noted), on_round=lambda record: 1 / 0)
    assert isinstance(CALLS[-1], ZeroDivisionError)


def test_each_run_of_a_comparison_is_logged_under_its_id(tiny_experiment, tmp_path):
    tables = logging(tiny_experiment | {"records.figures": []}, noted, rounds=1)
    plan = {"local.lr": [0.1, 0.2], "seed": [0, 1]}
    comparison = fedsim.compare(tables, plan, tmp_path / "comparison", jobs=1)
    runs = [each for each in CALLS if hasattr(each, "id")]
    assert [run.name for run in runs] == [run.id for run in comparison.runs]
    assert [(run.settings["local.lr"], run.settings["seed"]) for run in runs] == POINTS
    assert len({run.group for run in runs}) == 1


def test_the_loggers_that_come_with_fedsim():
    assert logger.names() == ["tensorboard", "wandb", "mlflow"]
    for records in ({"loggers": ["tensorboard"], "tensorboard": True}, {"tensorboard": True}):
        assert [each.name for each in fedsim.Experiment(records=records).records.all_loggers] == ["tensorboard"]
    with pytest.raises(ExperimentError, match='no such logger; did you mean "wandb"'):
        fedsim.Experiment(records={"loggers": ["wanb"]})


def test_scalars_has_the_numbers_of_a_record():
    record = RoundRecord(round=1, test_loss=0.5, seconds={"train": 1.0}, metrics={"update_norm": 2.0})
    assert scalars(record) == {"test/loss": 0.5, "seconds/train": 1.0, "metrics/update_norm": 2.0}
    work = AsyncRecord(updates=3, arrivals=5, staleness={"1": 1, "2": 3})
    timed = scalars(RoundRecord(round=1, virtual_seconds=9.0, asynchronous=work))
    names = {"updates": 3, "arrivals": 5, "staleness": 1.75}
    assert timed == {"clock/virtual_seconds": 9.0, **{f"asynchronous/{name}": value for name, value in names.items()}}


def board_of(folder):
    """Return what TensorBoard reads from the event files of a folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder)).Reload()


def steps_in(folder):
    return [event.step for event in board_of(folder).Scalars("test/loss")]


def test_the_event_file_holds_each_round_as_soon_as_it_is_over_and_the_settings(tiny_experiment, tmp_path):
    from tensorboard.plugins.hparams.metadata import SESSION_START_INFO_TAG, parse_session_start_info_plugin_data

    steps, folder = [], tmp_path / "run"
    tables = {**tiny_experiment, "records.tensorboard": True, "aggregate.rule": ["nnm", "median"]}
    result = fedsim.run(tables, folder, on_round=lambda _: steps.append(steps_in(folder)))
    assert steps == [[1], [1, 2]]
    board = board_of(folder)
    phases = {f"seconds/{phase}" for phase in ("broadcast", "train", "aggregate", "test")}
    tags = {"test/accuracy": "test_accuracy", "train/loss": "train_loss", "bytes/up": "bytes_up"}
    assert set(board.Tags()["scalars"]) == {*tags, "test/loss", "bytes/down", *phases}
    for tag, key in tags.items():
        values = [event.value for event in board.Scalars(tag)]
        assert values == pytest.approx([record[key] for record in result.history], rel=1e-6)
    content = board.SummaryMetadata(SESSION_START_INFO_TAG).plugin_data.content
    settings = parse_session_start_info_plugin_data(content).hparams
    assert (settings["workers"].number_value, settings["engine"].string_value) == (3, "serial")
    assert settings["aggregate.rule"].string_value == "nnm + median"
    assert "cohort" not in settings, "an unset key is not logged"


@pytest.mark.parametrize(("every", "stops_after"), [(0, 2), (None, 1)])
def test_the_rounds_of_a_resumed_run_are_shown_once(every, stops_after, tiny_experiment, tmp_path, monkeypatch):
    """The run starts again, or it is resumed within the same second and writes a second event file."""

    def stop(record):
        if record.round == stops_after:
            raise fedsim.StopRun

    tables = {**tiny_experiment, "records.tensorboard": True, "checkpoint": {"every": every}}
    monkeypatch.setattr("time.time", lambda: 1_000_000_000.0)
    fedsim.run(tables, tmp_path / "run", on_round=stop)
    fedsim.run(tables, tmp_path / "run", resume=True)
    assert len(list((tmp_path / "run").glob("events.out*"))) == 2
    assert steps_in(tmp_path / "run") == [1, 2]


def test_tensorboard_is_off_by_default_and_needs_a_folder(tiny_experiment, tmp_path):
    fedsim.run(tiny_experiment, tmp_path / "run")
    assert not list((tmp_path / "run").glob("events*"))
    fedsim.run(tiny_experiment, records={"tensorboard": True})


def test_a_missing_package_ends_the_run_at_once(tiny_experiment, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.partition(".")[0] == "tensorboard"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(
        MissingPackageError,
        match=r"the logger .tensorboard. needs the package tensorboard, .*: pip install tensorboard$",
    ):
        fedsim.run(tiny_experiment, tmp_path / "run", records={"tensorboard": True})
    assert not (tmp_path / "run").exists()


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
    comparison = fedsim.compare(tables, {"local.lr": [0.1, 0.2], "seed": [0, 1]}, "comparison", jobs=2)
    assert not comparison.failed, comparison.table
"""


def run_program(folder, name):
    """Run a program that resumes a run and then makes a comparison of four runs in two processes."""
    (folder / "program.py").write_text(PROGRAM)
    done = run_python(folder / "program.py", name, cwd=folder)
    assert done.returncode == 0, done.stderr


def records_in(log):
    """Yield the records of a LevelDB log: 32 KiB blocks of parts with checksum, length and kind (1: whole, 4: last)."""
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
    steps_of_runs, points = {}, {}
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        for data in records_in(path.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run") and record.run.display_name:
                config = {each.key: json.loads(each.value_json) for each in record.run.config.update}
                steps = steps_of_runs.setdefault((record.run.display_name, record.run.run_id), [])
                points[record.run.display_name] = (config["local.lr"], config["seed"])
            if record.HasField("history"):
                items = {each.key or each.nested_key[0]: json.loads(each.value_json) for each in record.history.item}
                assert 0 < items["test/accuracy"] <= 1
                steps.append(items["_step"])
    assert [steps for (name, _), steps in steps_of_runs.items() if name == "first"] == [[1, 2, 3]]
    del points["first"]
    assert sorted(points.values()) == POINTS
    assert [steps for (name, _), steps in steps_of_runs.items() if name != "first"] == [[1, 2]] * 4


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
    del runs["first"]
    settings = [run.data.params for run in runs.values()]
    assert sorted((float(params["local.lr"]), int(params["seed"])) for params in settings) == POINTS
