from __future__ import annotations

import multiprocessing
import re
from typing import ClassVar

import numpy as np
import pytest
import torch

import fedsim
from fedsim.comparison import Callback, plan_comparison, run_comparison, runner
from fedsim.comparison.jobs import default_jobs, job_bytes
from fedsim.data import sources
from fedsim.errors import SettingWarning
from tests import components

RULES = ["weighted_mean", "mean", {"rule": "tests.components:clipped_mean", "c": 0.1}]


def without_times(history):
    return [{key: value for key, value in record.items() if key != "seconds"} for record in history]


def test_runs_of_one_seed_are_paired(serial):
    """Runs of one seed have the same start, cohorts and batches, so they are equal until the first aggregation."""
    tables = {**serial, "workers": 6, "cohort": 3, "partition": "tests.components:uneven", "rounds": 3}
    runs = fedsim.compare(tables, {"aggregate": RULES, "seed": [0, 1]}).runs
    by_seed = {seed: [run for run in runs if run.point["seed"] == seed] for seed in (0, 1)}
    for same in by_seed.values():
        assert len({tuple(tuple(record["cohort"]) for record in run.history) for run in same}) == 1
        assert len({run.history[0]["train_loss"] for run in same}) == 1
        assert len({run.history[1]["train_loss"] for run in same}) == len(RULES)
        assert len({run.history[0]["test_loss"] for run in same}) == len(RULES)
    assert by_seed[0][0].history[0]["train_loss"] != by_seed[1][0].history[0]["train_loss"]
    assert by_seed[0][0].history[0]["cohort"] != by_seed[1][0].history[0]["cohort"]


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_warning_is_shown_once_for_all_runs(serial, jobs, capfd):
    tables = {**serial, "workers": 5, "rounds": 1, "attack": {"name": "alie", "workers": [1]}, "buffers": "frozen"}
    plan = {"model": ["logistic", "tests.models:Normalised"], "seed": [0, 1]}
    with pytest.warns(SettingWarning) as caught:
        comparison = fedsim.compare(tables, plan, jobs=jobs)
    assert not comparison.failed
    alie, buffers = sorted(str(warning.message) for warning in caught)
    assert alie.startswith("alie: z = 0 for n = 5, f = 1: ")
    assert buffers.startswith('buffers = "frozen": running statistics (layers.2.running_mean) are never updated')
    assert "warning" not in capfd.readouterr().err.lower()


def test_a_run_has_the_results_of_the_same_experiment_alone(serial, tmp_path):
    comparison = fedsim.compare(serial, {"aggregate": RULES, "seed": [0, 1]}, tmp_path)
    assert len(comparison.runs) == 6
    for run in comparison.runs[::5]:
        experiment = fedsim.load_experiment(run.folder / "experiment.toml", allow_imports=True)
        assert experiment.resolved() == run.experiment
        assert without_times(fedsim.run(experiment).history) == without_times(run.history)
    assert comparison.summary[0].accuracy.mean == pytest.approx(
        sum(run.test_accuracy for run in comparison.runs[:2]) / 2, abs=1e-12
    )


def test_without_a_folder_no_file_is_left(serial, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(runner.tempfile, "tempdir", None)
    monkeypatch.chdir(tmp_path)
    comparison = fedsim.compare(serial, {"seed": [0, 1]})
    assert comparison.folder is None
    assert [run.folder for run in comparison.runs] == [None, None]
    assert "test accuracy" in comparison.table
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_other_runs_continue_after_a_failure(quick, tmp_path, jobs):
    tables = {**quick, "rounds": 1, "model": {"name": "tests.models:Fails", "how": "never"}}
    axes = {"model.how": ["raise", "never"], "workers": [3, 1000], "seed": [0]}
    comparison = fedsim.compare(tables, axes, tmp_path / "x", jobs, skip_invalid=True)
    errors = [run.error for run in comparison.runs]
    assert re.match("worker [01] in round 1 failed", errors[0])  # both workers fail, and either error may arrive first
    assert "ZeroDivisionError: this model divides by zero" in errors[0]
    assert errors[1] == errors[3] == "workers = 1000: must be between 1 and the number of samples, 203"
    assert errors[2] is None
    assert comparison.failed == [comparison.runs[index] for index in (0, 1, 3)]
    assert "Traceback" in (comparison.runs[0].folder / "error.txt").read_text()
    assert "3 of 4 runs failed" in (tmp_path / "x" / "summary.txt").read_text()
    assert [row.failed for row in comparison.summary] == [1, 0, 1, 1]


def test_every_seed_is_checked_with_its_data_before_the_first_run(quick, tmp_path):
    """BatchNorm cannot be trained on a batch of one sample. Whether there is one depends on the seed's partition."""
    labels, seeds = components.tiny(None)[0].targets, range(12)
    shards = {seed: fedsim.partition(labels, "dirichlet", 4, seed=seed, alpha=1.0) for seed in seeds}
    bad = [seed for seed in seeds if any(len(shard) % 8 == 1 for shard in shards[seed])]
    good = [seed for seed in seeds if seed not in bad]
    tables = {**quick, "model": "tests.models:Normalised", "workers": 4, "local": {"batch_size": 8}, "rounds": 1}
    tables |= {"partition": {"name": "dirichlet", "alpha": 1.0}}
    with pytest.raises(fedsim.ExperimentError, match=r"one sample, on which the model cannot be trained") as caught:
        fedsim.compare(tables, {"seed": [good[0], *bad]}, tmp_path / "x", 1)
    assert len(bad) > 1
    listed = [re.findall(r"^seed=(\d+): |and (\d+) more", line) for line in caught.value.lines]
    assert sum(1 if seed else int(more) for pairs in listed for seed, more in pairs) == len(bad)
    assert not (tmp_path / "x").exists()
    assert not fedsim.compare(tables, {"seed": good[:2]}, tmp_path / "y", 1).failed


def test_a_data_set_is_loaded_once_for_the_plan_the_checks_and_all_runs(tmp_path, monkeypatch):
    """The plan needs the data for the model and the number of workers."""
    rng, names = np.random.default_rng(0), []
    arrays = {"inputs": rng.normal(size=(40, 3)), "targets": rng.integers(0, 2, 40), "ids": np.arange(40) % 4}
    np.savez(tmp_path / "data.npz", **arrays)
    load = sources.load_dataset
    monkeypatch.setattr(
        sources, "load_dataset", lambda name, *rest, **params: names.append(name) or load(name, *rest, **params)
    )
    tables = {"data": {"name": "npz", "path": str(tmp_path / "data.npz")}, "partition": "natural", "engine": "serial"}
    compared = fedsim.compare({**tables, "rounds": 1}, {"seed": [0, 1]}, jobs=1)
    assert not compared.failed
    assert len(names) == 1


def test_only_unfinished_and_failed_runs_are_repeated(serial, tmp_path, monkeypatch):
    plan = plan_comparison(serial, {"seed": [0, 1, 2]})
    attempt = runner.run_here.__globals__["attempt"]

    def failing(experiment, *rest):
        return "no\nmore" if experiment.seed == 1 else attempt(experiment, *rest)

    monkeypatch.setitem(runner.run_here.__globals__, "attempt", failing)
    assert [run.error for run in run_comparison(plan, tmp_path / "x").runs] == [None, "no", None]
    monkeypatch.undo()
    seen = Seen()
    again = run_comparison(plan, tmp_path / "x", callback=seen)
    assert [run.error for run in again.runs] == [None, None, None]
    assert seen.runs == [("start", ["seed1"]), ("round", "seed1"), ("round", "seed1"), ("end", "seed1")]
    assert not (again.runs[1].folder / "error.txt").exists()
    rest = Seen()
    run_comparison(plan, tmp_path / "x", callback=rest)
    assert rest.runs == [("start", [])]


class Seen(Callback):
    def __init__(self):
        self.runs = []

    def on_start(self, plan, todo, jobs):
        self.runs.append(("start", [run.id for run in todo]))

    def on_round(self, run, record):
        self.runs.append(("round", run.id))

    def on_end(self, run):
        assert len(run.history) == 2
        assert run.error is None
        self.runs.append(("end", run.id))


@pytest.mark.parametrize(("every", "repeated"), [(0, [1, 2, 3, 4]), (1, [3, 4])])
def test_an_interrupted_run_starts_again_or_at_its_checkpoint(serial, tmp_path, every, repeated):
    class Observer(Callback):
        rounds: ClassVar[list[int]] = []
        interrupting = True

        def on_round(self, run, record):
            if self.interrupting and (run.id, record["round"]) == ("seed1", 3):
                raise KeyboardInterrupt
            self.rounds.append(record["round"])

    tables = {**serial, "rounds": 4, "checkpoint": {"every": every}}
    plan = plan_comparison(tables, {"seed": [0, 1]})
    with pytest.raises(KeyboardInterrupt):
        run_comparison(plan, tmp_path, callback=Observer())
    temporary = tmp_path / "runs/seed1/.curve.png.part"
    temporary.write_text("half")
    Observer.interrupting = False
    Observer.rounds.clear()
    again = run_comparison(plan, tmp_path, callback=Observer())
    assert Observer.rounds == repeated
    assert not temporary.exists()
    whole = fedsim.run({**tables, "seed": 1})
    assert [record["test_loss"] for record in again.runs[1].history] == [r["test_loss"] for r in whole.history]


def test_processes_of_an_engine_are_kept_from_run_to_run(quick, tmp_path):
    seen = set()

    class Look(Callback):
        def on_round(self, run, record):
            seen.add(frozenset(process.pid for process in multiprocessing.active_children()))

    plan = plan_comparison({**quick, "engine": "processes", "processes": 2}, {"aggregate": RULES})
    run_comparison(plan, tmp_path, callback=Look())
    assert len(seen) == 1
    assert len(*seen) == 2


@pytest.fixture
def machine(monkeypatch):
    """Simulate a machine with 8 cores and one terabyte of memory."""
    monkeypatch.setattr("fedsim.comparison.jobs.usable_cores", lambda: 8)
    monkeypatch.setattr("fedsim.comparison.jobs.free_memory", lambda: 1e12)
    return monkeypatch


def jobs_for(tables, axes):
    plan = plan_comparison(tables, axes)
    return default_jobs(plan, plan.runs)


@pytest.mark.parametrize(
    ("change", "runs", "jobs"),
    [
        ({}, 3, 3),
        ({}, 20, 8),
        ({"threads_per_process": 3}, 20, 2),
        ({"threads_per_process": 9}, 20, 1),
        ({"engine": "serial"}, 3, 1),
        ({"engine": "processes"}, 3, 1),
        ({"processes": 2}, 3, 1),
    ],
)
def test_the_default_is_one_job_per_core_unless_the_experiment_sets_its_engine(quick, machine, change, runs, jobs):
    assert jobs_for({**quick, **change}, {"seed": list(range(runs))}) == jobs


def test_the_default_number_of_jobs_is_limited_by_memory_and_1_on_a_gpu(quick, machine):
    tables = {**quick, "workers": 100, "model": "2nn"}
    rows = 100 * 199_210 * 4
    assert rows < job_bytes(fedsim.Experiment(**tables)) < 10 * rows + 1e9
    machine.setattr("fedsim.comparison.jobs.free_memory", lambda: 5e9)
    assert 1 < jobs_for(tables, {"seed": list(range(20))}) < 8
    machine.setattr("fedsim.comparison.jobs.free_memory", lambda: 1.0)
    assert jobs_for(tables, {"seed": list(range(20))}) == 1
    machine.setattr("fedsim.comparison.jobs.free_memory", lambda: 1e12)
    machine.setattr("fedsim.comparison.jobs.resolve_device", lambda name: torch.device("cuda", 0))
    assert jobs_for(tables, {"seed": list(range(20))}) == 1
