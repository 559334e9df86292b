from __future__ import annotations

import json

import pytest
import torch

import fedsim
from fedsim.engines import AutoEngine, SerialEngine, auto
from fedsim.engines.stack_trainer import StackTrainer
from fedsim.engines.trainer import RowTrainer
from tests.engines.test_contract import CASES, ROUNDING, assert_close


@pytest.fixture
def tables(tiny_experiment):
    """In one process with one thread."""
    return {**tiny_experiment, "engine": "auto", "processes": 1}


@pytest.fixture
def speeds(monkeypatch):
    """Seconds that each way is found to take, by its label; notes which have been measured."""
    measured, seconds = [], {}

    def as_set(self, way, task, memory):
        measured.append(way.label)
        return seconds[way.label]

    monkeypatch.setattr(AutoEngine, "_seconds_per_round", as_set)
    seconds["measured"] = measured
    return seconds


def how_it_was_done(tables, workshop=None):
    settings = []
    fedsim.run(tables, on_start=settings.append, workshop=workshop)
    return settings[0].how


def test_choice_and_figures_are_in_the_run_folder(tables, tmp_path):
    fedsim.run(tables, tmp_path / "run")
    record = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert record["engine"] in ("serial", "batched")
    assert record["processes"] == 1
    assert set(record["probe"]) == {"serial", "batched"}
    assert all(0 < seconds < 60 for seconds in record["probe"].values())
    assert ("width" in record) == (record["engine"] == "batched")
    assert fedsim.load_experiment(tmp_path / "run" / "experiment.toml", allow_imports=True).engine == "auto"


@pytest.mark.parametrize(
    ("serial", "batched", "chosen"), [(1.0, 0.5, "batched"), (1.0, 0.95, "serial"), (0.5, 1.0, "serial")]
)
def test_stacks_are_chosen_where_they_gain_more_than_a_little(serial, batched, chosen, tables, speeds):
    speeds.update(serial=serial / 100, batched=batched / 100)
    how = how_it_was_done(tables)
    assert how["engine"] == chosen
    assert how["probe"] == {"serial": serial / 100, "batched": batched / 100}


def test_no_processes_are_started_where_they_save_less_than_their_start(tables, speeds):
    seconds = auto.START_SECONDS * 0.9  # of which two processes save half, in each of 2 rounds
    speeds.update({"serial": seconds, "serial, 2 threads": seconds, "batched, 2 threads": 9.0})
    assert how_it_was_done({**tables, "processes": 2})["processes"] == 1
    assert speeds["measured"] == ["serial", "serial, 2 threads", "batched, 2 threads"]


HERE = ["serial", "serial, 2 threads", "batched, 2 threads"]
SPAWN, BOTH = [*HERE, "spawn"], [*HERE, "spawn", "batched, 2 processes"]


@pytest.mark.parametrize(
    ("threads", "batched", "spawn", "both", "chosen", "measured"),
    [
        (9.0, 9.0, 4.0, None, ("spawn", 2, 1), SPAWN),  # stacks that are hopeless are not tried there
        (9.0, 7.0, 4.0, 3.5, ("batched", 2, 1), BOTH),
        (9.0, 7.0, 4.0, 3.7, ("spawn", 2, 1), BOTH),
        (9.0, 3.2, 4.0, 3.4, ("batched", 1, 2), HERE),  # processes would hardly be faster
        (9.0, 7.0, 6.0, 6.0, ("serial", 1, 1), BOTH),
        (4.4, 7.0, 6.0, 6.0, ("serial", 1, 2), BOTH),
        (4.6, 7.0, 6.0, 6.0, ("serial", 1, 1), BOTH),
    ],
)
def test_a_long_run_goes_the_way_that_is_fastest(
    threads, batched, spawn, both, chosen, measured, tables, speeds, monkeypatch
):
    monkeypatch.setattr(auto, "SpawnEngine", SerialEngine)  # what is measured there is set anyhow
    speeds.update(dict(zip(BOTH, (5.0, threads, batched, spawn, both), strict=True)))
    how = how_it_was_done({**tables, "processes": 2})
    assert (how["engine"], how["processes"], how["threads"]) == chosen
    assert speeds["measured"] == measured


@pytest.mark.parametrize("threads", [1, 2])
def test_a_way_with_several_threads_computes_with_them_and_no_other_does(threads, tables, speeds, monkeypatch):
    seen = []
    monkeypatch.setattr(auto.StackTrainer, "train", lambda *_: seen.append(torch.get_num_threads()))
    before = torch.get_num_threads()
    speeds.update({"serial": 1.0, "serial, 2 threads": 1.0, "batched": 0.1, "batched, 2 threads": 0.1})
    how = how_it_was_done({**tables, "processes": threads})
    assert (how["engine"], how["threads"]) == ("batched", threads)
    assert set(seen) == {threads}
    assert torch.get_num_threads() == before


def test_processes_that_are_started_to_measure_do_the_run(tables, monkeypatch):
    measured = AutoEngine._seconds_per_round

    def in_favour_of_both(self, way, task, memory):
        seconds = measured(self, way, task, memory)
        return seconds / 1e6 if (way.engine, way.processes) == ("batched", 2) else seconds

    monkeypatch.setattr(AutoEngine, "_seconds_per_round", in_favour_of_both)
    monkeypatch.setattr(auto, "START_SECONDS", 0.0)
    monkeypatch.setattr(auto, "HOPELESS", 1e9)
    tables, settings = {**tables, "precision": "float64", "processes": 2}, []
    found = fedsim.run(tables, on_start=settings.append)
    how = settings[0].how
    assert (how["engine"], how["processes"]) == ("batched", 2)
    assert set(how["probe"]) == set(BOTH)
    assert_close(fedsim.run({**tables, "engine": "serial", "processes": None}), found, ROUNDING)


def test_a_model_that_cannot_be_stacked_runs_all_the_same_and_the_reason_is_noted(tables):
    result_of = [fedsim.run({**tables, "model": "tests.plugs:Stateful", "engine": name}) for name in ("serial", "auto")]
    assert torch.equal(result_of[0].global_row, result_of[1].global_row)
    how = how_it_was_done({**tables, "model": "tests.plugs:Stateful"})
    assert how["engine"] == "serial"
    assert how["probe"]["serial"] > 0
    assert "the rows of this model cannot be stacked: its training changes attributes" in how["probe"]["batched"]


def test_what_differs_in_nothing_that_speed_depends_on_is_not_measured_again(tables, speeds):
    speeds.update(serial=0.01, batched=0.001)
    with fedsim.Workshop() as workshop:
        for change in ({}, {"seed": 1}, {"aggregate": "median"}, {"server": {"optimizer": "momentum"}}):
            how_it_was_done({**tables, **change}, workshop)
        assert len(speeds["measured"]) == 2
        changes = {"model": "logistic"}, {"rounds": 3}, {"workers": 4}, {"local": {"batch_size": 8}}
        changes = (*changes, {"model": "net"}, {"model": {"name": "net", "dropout": 0.0}})  # of one shape
        for count, change in enumerate(changes, start=2):
            how_it_was_done({**tables, **change}, workshop)
            assert len(speeds["measured"]) == 2 * count, change


def test_models_by_import_path_are_told_apart(tables, speeds):
    """By what they are, not by where in memory they have been."""
    speeds.update(serial=0.01, batched=0.001)
    with fedsim.Workshop() as workshop:
        for hidden in ([8, 8], [8, 8], [9, 9]):
            how_it_was_done({**tables, "model": {"name": "tests.plugs:sized", "hidden": hidden}}, workshop)
    assert len(speeds["measured"]) == 4


@pytest.mark.parametrize("way", ["serial", "batched"])
@pytest.mark.parametrize("sync", ["parameters", "gradients"])
@pytest.mark.parametrize(
    "case", ["dropout", "partial cohorts of uneven shards", "a rule with data of the server's own"]
)
def test_measuring_does_not_show_in_the_results(case, sync, way, tiny_experiment, monkeypatch):
    tables = {**tiny_experiment, "sync": sync, **CASES[case], "precision": "float64"}
    monkeypatch.setattr(auto, "GAIN", 1e9 if way == "batched" else 1e-9)
    settings = []
    serial = fedsim.run(tables)
    chosen = fedsim.run({**tables, "engine": "auto", "processes": 1}, on_start=settings.append)
    assert settings[0].how["engine"] == way
    if way == "serial":
        assert torch.equal(serial.global_row, chosen.global_row)
    assert_close(serial, chosen, ROUNDING)


def test_a_failure_of_single_rows_while_measuring_is_one_of_that_model(tables, monkeypatch):
    monkeypatch.setattr(RowTrainer, "train", lambda self, members: 1 / 0)
    with pytest.raises(fedsim.WorkerError, match="failed before the first worker: ZeroDivisionError"):
        fedsim.run(tables)


def test_a_failure_of_stacks_alone_is_noted_and_the_model_runs_all_the_same(tables, monkeypatch):
    monkeypatch.setattr(StackTrainer, "train", lambda self, members: 1 / 0)
    how = how_it_was_done(tables)
    assert how["engine"] == "serial"
    assert "failed before the first worker: ZeroDivisionError" in how["probe"]["batched"]


def test_a_failure_of_stacks_in_other_processes_alone_is_noted_and_processes_start_anew(tables, monkeypatch):
    measured = AutoEngine._seconds_per_round

    def in_favour_of_spawn(self, way, task, memory):
        if (way.engine, way.processes) == ("batched", 2):
            self._crew.close()
            raise fedsim.WorkerError("process 1 was killed")
        return measured(self, way, task, memory) / (1e6 if way.engine == "spawn" else 1)

    monkeypatch.setattr(AutoEngine, "_seconds_per_round", in_favour_of_spawn)
    monkeypatch.setattr(auto, "START_SECONDS", 0.0)
    monkeypatch.setattr(auto, "HOPELESS", 1e9)
    settings = []
    found = fedsim.run({**tables, "processes": 2}, on_start=settings.append)
    assert settings[0].how["engine"] == "spawn"
    assert settings[0].how["probe"]["batched, 2 processes"] == "process 1 was killed"
    assert torch.equal(found.global_row, fedsim.run({**tables, "engine": "serial", "processes": None}).global_row)


def test_where_devices_share_no_memory_there_is_one_process():
    assert AutoEngine.default_processes(torch.device("mps", 0), 8, 1) == 1
    assert AutoEngine.default_processes(torch.device("cpu"), 1, 1) == 1
