from __future__ import annotations

import json
import multiprocessing
import os
import re
import shutil
import signal

import pytest

import fedsim
from fedsim.comparison import Callback, jobs, plan_comparison, run_comparison
from fedsim.comparison.folder import Shard
from fedsim.comparison.runner import merge
from fedsim.errors import FedsimWarning
from fedsim.processes import process_pool
from fedsim.processes.child_process import start_process
from tests.comparison.conftest import quick_tables
from tests.comparison.test_runner import without_times
from tests.lethal import order
from tests.processes.pool_calls import never_report


def children():
    return {process.pid for process in multiprocessing.active_children()}


def histories(comparison):
    return [without_times(run.history) for run in comparison.runs]


def engines_of(comparison):
    """Return the set of engines that the runs used."""
    files = [run.folder / "experiment.toml" for run in comparison.runs]
    return {fedsim.load_experiment(file, allow_imports=True).engine for file in files}


class Observer(Callback):
    """A callback that records the child processes and runs at each round, and the repeated runs."""

    def __init__(self, act=lambda seen: None):
        self.processes, self.runs, self.retried, self._act = [], set(), [], act

    def on_start(self, plan, todo, jobs):
        self.jobs, self._before = jobs, children()

    def on_round(self, run, record):
        self.processes.append(children() - self._before)
        self.runs.add(run.id)
        self._act(self)

    def on_retry(self, run):
        self.retried.append(run.id)


def test_several_jobs_give_the_results_of_one_and_keep_their_processes(quick, serial, tmp_path):
    axes = {"model": ["logistic", "2nn"], "seed": [0, 1]}
    observer = Observer()
    several_jobs = run_comparison(plan_comparison(quick, axes), tmp_path / "several", 2, observer)
    one_job = fedsim.compare(serial, axes, tmp_path / "one")
    assert histories(several_jobs) == histories(one_job)
    assert observer.jobs == 2
    assert len(set.union(*observer.processes)) == 2
    assert engines_of(several_jobs) == {"auto"}
    tables = [(tmp_path / name / "summary.txt").read_text().splitlines()[:8] for name in ("several", "one")]
    assert tables[0] == tables[1]


@pytest.fixture
def for_stacks(quick):
    return stackable(quick)


def stackable(tables):
    """Return an experiment that `auto` trains in stacks, with workers that finish after different steps."""
    partition = {"name": "dirichlet", "alpha": 0.5}
    return {**tables, "workers": 10, "partition": partition, "local": {"batch_size": 4, "lr": 0.05}}


def test_jobs_cores_missing_runs_and_shards_decide_where_runs_are_computed_but_change_no_bit(
    for_stacks, tmp_path, monkeypatch
):
    axes = {"aggregate.rule": ["mean", "median"], "seed": [0, 1]}

    def results(name, jobs=None, cores=2, shard=None):
        monkeypatch.setattr("fedsim.comparison.jobs.usable_cores", lambda: cores)
        monkeypatch.setattr("fedsim.system.devices.usable_cores", lambda: cores)
        plan = plan_comparison(for_stacks, axes)
        return run_comparison(plan, tmp_path / name, jobs, shard=shard)

    first = results("one job", jobs=1, cores=1)
    metadata = [json.loads((run.folder / "environment.json").read_text()) for run in first.runs]
    assert {(how["engine"], how["width"]) for how in metadata} == {("batched", 5)}
    assert histories(results("one job on three cores", jobs=1, cores=3)) == histories(first)
    assert histories(results("two jobs")) == histories(first)
    shutil.rmtree(tmp_path / "two jobs" / "runs" / first.runs[2].id)
    assert histories(results("two jobs")) == histories(first)  # with one missing run there is one job
    for index in (0, 1):
        results(f"shards/{index}-of-2", jobs=index + 1, shard=Shard(index, 2))
    assert histories(merge([tmp_path], tmp_path / "merged", allow_imports=True)) == histories(first)


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ("serial", "auto", "1 run with engine=serial instead of auto .such as seed0.$"),
        ("batched", "serial", "1 run with engine=batched instead of serial .such as seed0.$"),
        ("serial", "processes", None),  # they agree bit for bit
    ],
)
def test_runs_by_another_engine_are_named_in_one_line(before, now, told, for_stacks, tmp_path, recwarn):
    for engine, seeds in ((before, [0]), (now, [0, 1])):
        fedsim.compare({**for_stacks, "engine": engine, "processes": 1}, {"seed": seeds}, tmp_path, jobs=1)
    lines = [str(each.message) for each in recwarn if each.category is FedsimWarning]
    assert len(lines) == (told is not None)
    assert told is None or re.match(f"{tmp_path}: results may differ in the last bits: {told}", lines[0])


@pytest.fixture(scope="module")
def stacked(tmp_path_factory):
    """Return the folder of a finished comparison of two seeds, trained in stacks."""
    folder = tmp_path_factory.mktemp("stacked") / "comparison"
    fedsim.compare(stackable(quick_tables()), {"seed": [0, 1]}, folder, jobs=1)
    return folder


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"cpu_capability": "AVX1024"}, ".* 1 run with .*AVX1024 .such as seed1."),
        (
            {"width": 40},
            "1 run with stacks of 5 workers .such as seed0.; 1 run with stacks of 40 workers .such as seed1.",
        ),
        ({"device": "cuda:0"}, "1 run with cpu float32 float32 False .*; 1 run with cuda:0 float32 float32 False"),
        (
            {"arithmetic": {"tf32": True}},
            "1 run with cpu float32 float32 False .*; 1 run with cpu True .such as seed1.",
        ),
    ],
)
def test_runs_with_the_same_settings_that_were_computed_in_different_ways_are_named(
    change, told, for_stacks, stacked, tmp_path
):
    folder = shutil.copytree(stacked, tmp_path / "comparison")
    file = folder / "runs" / "seed1" / "environment.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.warns(FedsimWarning, match=f"results may differ in the last bits: {told}"):
        fedsim.compare(for_stacks, {"seed": [0, 1]}, folder, jobs=1)


def test_runs_whose_settings_need_other_stacks_or_precisions_are_not_reported(for_stacks, tmp_path, recwarn):
    axes = {"workers": [4, 10], "precision": ["float32", "float64"]}
    fedsim.compare(for_stacks, axes, tmp_path, jobs=1)
    assert not [each for each in recwarn if each.category is FedsimWarning]


@pytest.mark.slow
def test_jobs_of_an_experiment_that_sets_its_engine_have_child_processes(quick, tmp_path):
    tables = {**quick, "rounds": 1, "engine": "processes", "processes": 1}
    comparison = fedsim.compare(tables, {"seed": [0, 1]}, tmp_path, jobs=2)
    assert not comparison.failed
    assert engines_of(comparison) == {"processes"}


def test_a_run_whose_process_was_lost_is_repeated_with_the_same_result(quick, serial, tmp_path):
    killed = []

    def kill_both(seen):
        if len(seen.runs) == 2 and not killed:
            killed.extend(children())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    observer = Observer(kill_both)
    with pytest.warns(FedsimWarning, match="by SIGKILL .* the run is repeated .restart 1, max_restarts = 2") as warned:
        comparison = run_comparison(
            plan_comparison({**quick, "rounds": 20}, {"seed": [0, 1, 2]}), tmp_path, 2, observer
        )
    assert not comparison.failed
    assert 1 <= len(observer.retried) == len(warned) <= 2
    assert not observer.processes[-1] & set(killed), "other processes replace them"
    assert histories(comparison) == histories(fedsim.compare({**serial, "rounds": 20}, {"seed": [0, 1, 2]}))


@pytest.mark.slow
def test_a_run_that_loses_every_process_fails_and_says_how_often_it_was_tried(quick, tmp_path):
    tables = {**quick, "rounds": 1, "max_restarts": 1, "model": {"name": "tests.models:Fails", "how": "kill"}}
    with pytest.warns(
        FedsimWarning, match="^seed[01]: its process, working on .* repeated .restart 1, max_restarts = 1"
    ):
        comparison = run_comparison(plan_comparison(tables, {"seed": [0, 1]}), tmp_path, 2)
    ends = [run.error.rpartition("; ")[2] for run in comparison.failed]
    assert ends == ["the run has been tried 2 times (max_restarts = 1)"] * 2


def test_a_process_that_is_killed_while_it_starts_is_replaced(quick, serial, tmp_path, monkeypatch):
    killed = []

    def start_two_in_vain(serve, *arguments, **options):
        if len(killed) == 2:
            return start_process(serve, *arguments, **options)
        child = start_process(never_report, *arguments, **options)  # so that it is killed before it has started
        killed.append(child.process.pid)
        child.process.kill()
        child.process.join(60)
        return child

    monkeypatch.setattr(process_pool, "start_process", start_two_in_vain)
    with pytest.warns(
        FedsimWarning, match=r"SIGKILL .*, while it started.*, and the run is repeated \(restart 1, max_restarts = 2"
    ):
        comparison = run_comparison(
            plan_comparison({**quick, "rounds": 2}, {"seed": [0, 1, 2]}), tmp_path, 2, Observer()
        )
    assert len(killed) == 2
    assert not comparison.failed
    assert histories(comparison) == histories(fedsim.compare({**serial, "rounds": 2}, {"seed": [0, 1, 2]}))


@pytest.mark.slow
def test_a_process_that_is_stopped_while_it_prepares_a_run_is_replaced(quick, serial, tmp_path, monkeypatch):
    monkeypatch.setattr(jobs, "START_TIMEOUT", 3.0)
    data = {"name": "tests.lethal:tiny_after_orders", "folder": str(tmp_path)}
    order(tmp_path, "load-stop")
    with pytest.warns(FedsimWarning, match=r"no heartbeat for 3 s.*, and the run is repeated"):
        comparison = run_comparison(
            plan_comparison({**quick, "rounds": 1, "data": data}, {"seed": [0, 1]}), tmp_path / "comparison", 2
        )
    assert histories(comparison) == histories(fedsim.compare({**serial, "rounds": 1, "data": data}, {"seed": [0, 1]}))


def test_a_model_that_ends_its_process_fails_only_its_run_and_slow_work_does_not_fail(quick, tmp_path):
    """The slow model takes longer than the timeout but reports progress: 15 steps, each 0.2 s from the fourth on."""
    tables = {**quick, "rounds": 1, "workers": 1, "process_timeout": 2.0, "local": {"batch_size": 14}}
    tables["model"], tables["max_restarts"] = {"name": "tests.models:Fails", "how": "never"}, 0
    axes = {"model.how": ["hang", "slow", "kill", "exit", "never"]}
    hang, slow, kill, exited, never = fedsim.compare(tables, axes, tmp_path, jobs=2).runs
    process = "its process, working on worker 0 in round 1, "
    assert hang.error.startswith("its process has sent no heartbeat for 2 s (worker 0 in round 1); if a step")
    assert kill.error == f"{process}was killed by SIGKILL (exit code -9); if memory ran out, try fewer jobs"
    assert exited.error.startswith(f"{process}ended with exit code 0 before its work was done")
    assert slow.error is None
    assert never.error is None
    assert slow.history[0]["seconds"]["train"] > 2.0
