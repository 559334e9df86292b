from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from types import SimpleNamespace

import pytest

import fedsim
from fedsim.comparison import Watcher, jobs, load_grid, run_grid
from fedsim.errors import FedsimWarning
from fedsim.system.processes import Child
from tests.commands import run_python
from tests.comparison.test_comparing import without_times


def children():
    return {process.pid for process in multiprocessing.active_children()}


class Look(Watcher):
    """Notes which processes there are at every round."""

    def __init__(self, act=lambda run, record: None):
        self.seen, self.jobs, self._act = [], None, act

    def start(self, grid, todo, jobs):
        self.jobs = jobs

    def round(self, run, record):
        self.seen.append(children())
        self._act(run, record)


def test_several_jobs_give_the_bits_of_one_and_keep_their_processes(quick, serial, tmp_path):
    axes = {"model": ["logistic", "2nn"], "seed": [0, 1]}
    look = Look()
    several = run_grid(load_grid(quick, axes), tmp_path / "several", 2, look)
    one = fedsim.compare(serial, axes, tmp_path / "one")
    assert [without_times(run.history) for run in several.runs] == [without_times(run.history) for run in one.runs]
    assert look.jobs == 2
    assert len(set.union(*look.seen)) == 2, "one process a job, the same for all runs"
    assert all(
        fedsim.load_experiment(run.folder / "experiment.toml", allow_imports=True).engine == "serial"
        for run in several.runs
    )
    table = (tmp_path / "several" / "summary.txt").read_text()
    assert table.splitlines()[:8] == (tmp_path / "one" / "summary.txt").read_text().splitlines()[:8]


@pytest.mark.slow
def test_jobs_of_an_experiment_that_names_its_engine_have_processes_of_their_own(quick, tmp_path):
    tables = {**quick, "rounds": 1, "engine": "spawn", "processes": 1}
    comparison = fedsim.compare(tables, {"seed": [0, 1]}, tmp_path, jobs=2)
    assert not comparison.failed
    assert {
        fedsim.load_experiment(run.folder / "experiment.toml", allow_imports=True).engine for run in comparison.runs
    } == {"spawn"}


def test_the_death_of_a_job_fails_its_run_alone(quick, tmp_path):
    """Two runs at once; when both have begun the process of one is killed, and the rest goes on, some in another."""
    in_hand, killed = set(), set()

    def kill(run, record):
        in_hand.add(run.id)
        if record["round"] == 80:
            in_hand.remove(run.id)
        if len(in_hand) == 2 and not killed:
            killed.add(min(children()))
            os.kill(*killed, signal.SIGKILL)

    look = Look(kill)
    grid = load_grid({**quick, "rounds": 80, "on_worker_failure": "abort"}, {"seed": [0, 1, 2, 3]})
    comparison = run_grid(grid, tmp_path, 2, look)
    (failed,) = comparison.failed
    assert "was killed by SIGKILL (exit code -9); if memory ran out, try fewer jobs" in failed.error
    assert [len(run.history) for run in comparison.runs if run is not failed] == [80, 80, 80]
    assert len(set.union(*look.seen)) == 3, "another process takes its place"
    assert not look.seen[-1] & killed
    assert not run_grid(grid, tmp_path, 1).failed, "and they are done again"


def test_a_run_whose_process_was_lost_is_done_again_and_comes_to_the_same(quick, serial, tmp_path):
    """Two runs at once; when both have begun their processes are killed."""
    seen, killed = set(), []

    def kill(run, record):
        seen.add(run.id)
        if len(seen) == 2 and not killed:
            killed.extend(children())
            for pid in killed:
                os.kill(pid, signal.SIGKILL)

    axes, look = {"seed": [0, 1, 2]}, Look(kill)
    look.again = lambda run: again.append(run.id)
    again: list[str] = []
    with pytest.warns(FedsimWarning, match="by SIGKILL .* the run is done again .1 of at most 2 times") as said:
        comparison = run_grid(load_grid({**quick, "rounds": 20}, axes), tmp_path, 2, look)
    assert not comparison.failed
    assert again
    assert len(again) == len(said) <= 2
    alone = fedsim.compare({**serial, "rounds": 20}, axes)
    assert [without_times(run.history) for run in comparison.runs] == [without_times(run.history) for run in alone.runs]


def test_a_process_that_is_killed_while_it_starts_is_replaced(quick, serial, tmp_path, monkeypatch):
    killed = []

    class Killed(Child):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            if len(killed) < 2:
                killed.append(self.pid)
                os.kill(self.pid, signal.SIGKILL)

    monkeypatch.setattr(jobs, "Child", Killed)
    axes = {"seed": [0, 1, 2]}
    with pytest.warns(FedsimWarning, match=r"SIGKILL .*, while it started.*; the run is done again \(1 of at most 2"):
        comparison = run_grid(load_grid({**quick, "rounds": 2}, axes), tmp_path, 2, Look())
    assert not comparison.failed
    alone = fedsim.compare({**serial, "rounds": 2}, axes)
    assert [without_times(run.history) for run in comparison.runs] == [without_times(run.history) for run in alone.runs]


def test_work_is_sent_without_waiting_for_a_process_that_hangs_while_it_starts(tmp_path):
    """The work is larger than what a pipe holds."""
    planned = SimpleNamespace(experiment=SimpleNamespace(timeout=1.0))
    with jobs.Jobs() as started:
        started.grow(1)
        (job,) = started.idle
        os.kill(job._child.pid, signal.SIGSTOP)
        begin = threading.Thread(target=job.begin, args=(planned, bytes(2**24), tmp_path), daemon=True)
        begin.start()
        begin.join(10)
        blocked = begin.is_alive()
        os.kill(job._child.pid, signal.SIGKILL)
    assert not blocked
    assert job.planned is planned


@pytest.mark.slow
def test_a_run_that_loses_its_process_again_and_again_fails_and_says_how_often(quick, tmp_path):
    tables = {**quick, "rounds": 1, "worker_retries": 1, "model": {"name": "tests.plugs:Fails", "how": "kill"}}
    with pytest.warns(FedsimWarning, match="^seed[01]: its process, working on .* again .1 of at most 1 time"):
        comparison = run_grid(load_grid(tables, {"seed": [0, 1]}), tmp_path, 2, Look())
    assert [run.error.rpartition("; ")[2] for run in comparison.failed] == ["the run has been tried 2 times"] * 2


def test_what_a_model_does_to_its_process_fails_its_run_alone_and_slow_work_fails_none(quick, tmp_path):
    """The slow one takes longer than the timeout, but shows signs of life: 15 steps, from the fourth on of 0.2 s."""
    tables = {**quick, "rounds": 1, "workers": 1, "timeout": 2.0, "local": {"batch_size": 14}}
    tables["model"], tables["on_worker_failure"] = {"name": "tests.plugs:Fails", "how": "never"}, "abort"
    axes = {"model.how": ["hang", "slow", "kill", "exit", "never"]}
    hang, slow, kill, exited, never = fedsim.compare(tables, axes, tmp_path, jobs=2).runs
    process = "its process, working on worker 0 in round 1, "
    assert hang.error.startswith(f"{process}gave no sign of life for 2 s")
    assert kill.error.startswith(f"{process}was killed by SIGKILL (exit code -9)")
    assert exited.error.startswith(f"{process}ended with exit code 0 before its work was done")
    assert slow.error is None
    assert never.error is None
    assert slow.history[0]["seconds"]["train"] > 2.0


def test_an_interrupt_ends_all_jobs_at_once(quick, tmp_path):
    def interrupt(run, record):
        raise KeyboardInterrupt

    grid = load_grid({**quick, "rounds": 100_000}, {"seed": [0, 1]})
    with pytest.raises(KeyboardInterrupt):
        run_grid(grid, tmp_path, 2, Look(interrupt))
    assert children() == set()


def test_a_script_without_a_main_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import fedsim\nfedsim.compare({'data': 'tests.plugs:tiny'}, {'seed': [0, 1]}, 'x', jobs=2)\n")
    done = run_python(str(script), cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("fedsim.errors.WorkerError: no run can begin: its process ended with exit code 1 while it")
    assert 'needs `if __name__ == "__main__":` around what it does' in last
    assert last.endswith("or else jobs=1 with engine=serial, which start none")
