from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.commands import assert_none_left, processes_of_group, read_until, run_on_a_terminal, start

QUICK = ["name=quick", "model=logistic", "data=tests.components:tiny", "workers=3", "rounds=2"]
SERIAL = [*QUICK, "engine=serial"]


@pytest.mark.usefixtures("pictures")
def test_it_prints_a_line_per_run_the_table_and_the_folder(cli, tmp_path):
    done = cli("compare", *SERIAL, "aggregate.rule=mean,weighted_mean", "seed=0,1")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert lines[0] == "quick: 4 runs (2 aggregate.rule x 2 seed), 1 at a time"
    assert [line.partition(":")[0] for line in lines[1:5]] == [
        *("[1/4] mean-seed0", "[2/4] mean-seed1", "[3/4] weighted_mean-seed0", "[4/4] weighted_mean-seed1")
    ]
    assert re.match(r"4 runs in \d+\.\d s", lines[5])
    assert lines[7].startswith("Best aggregate.rule by test accuracy: ")
    assert lines[9].startswith("aggregate.rule ")
    folder = tmp_path / lines[-1]
    assert re.match(r"runs/quick-comparison-\d{8}-\d{6}$", lines[-1])
    assert (folder / "summary.txt").read_text().strip() == "\n".join(lines[7:-2])
    assert (folder / "accuracy.png").is_file()


def test_a_table_for_a_paper_is_alone_on_stdout(cli, tmp_path):
    words = [*SERIAL, "rounds=1", "aggregate.rule=mean,median", "seed=0,1", "records.figures=[]", "--out", "x"]
    done = cli("compare", *words, "--table", "latex")
    again = cli("compare", "x", "--table", "latex", "--allow-imports")
    assert done.stdout == again.stdout
    assert done.stdout.startswith("\\begin{tabular}")
    assert all(line.startswith("%") for line in done.stdout.partition("\\end{tabular}\n")[2].split("\n") if line)
    assert done.stderr.splitlines()[0].startswith("quick: 4 runs")
    assert done.stderr.splitlines()[-1] == again.stderr.strip() == "x"


def test_a_dry_run_lists_the_runs_and_leaves_nothing(cli, tmp_path):
    done = cli("compare", *QUICK, "local.lr=0.1,0.2", "seed=0,1", "--dry-run")
    assert done.stdout.splitlines() == [
        f"lr{lr}-seed{seed}: local.lr={lr} seed={seed}" for lr in (0.1, 0.2) for seed in (0, 1)
    ]
    assert list(tmp_path.iterdir()) == []


def test_failed_runs_are_listed_and_the_exit_code_is_1(cli):
    done = cli("compare", *SERIAL, "workers=3,1000", "--out", "x", "--skip-invalid")
    assert done.exit_code == 1
    assert done.stderr == "error: workers1000: workers = 1000: must be between 1 and the number of samples, 203\n"
    assert "[2/2] workers1000: failed: workers = 1000: must be between" in done.stdout
    assert "1 of 2 runs failed" in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["workers=1,2", "cohort=2"], "error: workers=1: cohort = 2: must be at most 1, the number of workers"),
        (["seed=0,1", "--jobs", "0"], "error: jobs = 0: must be at least 1\n"),
        (["workers=3,1000"], "error: workers=1000: workers = 1000: must be between 1 and the number of samples, 203"),
        (["workers=3,1000", "--dry-run"], "error: workers=1000: workers = 1000: must be between 1 and the number of"),
    ],
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(cli, tmp_path, words, message):
    done = cli("compare", *SERIAL, *words, "--out", "x")
    assert done.exit_code == 2
    assert done.stderr.startswith(message)
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "x").exists()


LONG = ["-m", "fedsim", "compare", *QUICK, "rounds=30", "records.figures=[]", "--jobs", "2", "--out", "x"]
ENDLESS = ["seed=0,1,2,3", "local.lr=0.01,0.02"]


def finished_runs(folder):
    counts = {path.parent.name: path.read_text().count("\n") for path in folder.glob("runs/*/metrics.jsonl")}
    return {name for name, rounds in counts.items() if rounds == 30}


def assert_continues(cli, tmp_path, before):
    done = cli(*LONG[2:], *ENDLESS, "--jobs", "1", "processes=1")  # in this process
    assert done.exit_code == 0, done.output
    assert f"{len(before)} of them already finished" in done.stdout
    assert not any(f" {name}: " in done.stdout for name in before)
    assert len(finished_runs(tmp_path / "x")) == 8


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), pytest.param(signal.SIGTERM, 143, "terminated", marks=pytest.mark.slow)],
)
def test_a_signal_ends_everything_and_the_same_command_continues(cli, tmp_path, number, code, word):
    process = start(*LONG, *ENDLESS, cwd=tmp_path)
    read_until(process, "[2/8]")
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    out, error = process.communicate(timeout=20)
    assert (process.returncode, error.strip()) == (code, word)
    assert re.search(r"\d of 8 runs are finished in x; repeat the command with --out x\n$", out)
    assert_none_left(process.pid)
    before = finished_runs(tmp_path / "x")
    assert len(before) >= 2
    assert_continues(cli, tmp_path, before)


def test_ctrl_c_while_jobs_start_leaves_no_process(tmp_path):
    process = start(*LONG, *ENDLESS, cwd=tmp_path)
    while len(processes_of_group(process.pid)) < 3:
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGINT)
    out, error = process.communicate(timeout=20)
    assert (process.returncode, error.strip()) == (130, "interrupted")
    assert out.endswith("\n0 of 8 runs are finished in x; repeat the command with --out x\n")
    assert_none_left(process.pid)


def test_jobs_and_their_processes_end_when_the_program_is_killed(tmp_path):
    process = start(*LONG, *ENDLESS, "engine=processes", "processes=1", cwd=tmp_path)
    read_until(process, "[2/8]")
    assert len(processes_of_group(process.pid)) >= 5
    process.kill()
    process.communicate(timeout=20)
    assert_none_left(process.pid)
    assert len(finished_runs(tmp_path / "x")) >= 2


def test_on_a_terminal_one_bar_counts_the_rounds_of_all_runs(tmp_path):
    words = ["-m", "fedsim", "compare", *SERIAL, "rounds=30", "seed=0,1,2", "records.figures=[]"]
    out, shown = run_on_a_terminal(*words, cwd=tmp_path)
    assert out.count("accuracy 0.") == 3
    assert re.search(r"\d+ of 90 rounds, \d\d:\d\d left, \d of 3 runs", shown)
    assert shown.count("checking the runs\r\x1b[K") == 2  # of the settings, and with the data


@pytest.mark.usefixtures("pictures")
def test_a_comparison_on_the_clock_has_virtual_seconds_and_a_target(cli, tmp_path):
    words = [*SERIAL, "mode=clock", "policy=sync,asgd", "clock.noise=lognormal", "clock.noise.sigma=0.2", "seed=0,1"]
    done = cli("compare", *words, "--target", "0.2", "--out", "x")
    assert done.exit_code == 0, done.output
    head = next(line for line in done.stdout.splitlines() if line.startswith("policy "))
    assert "virtual s to 20 percent  updates" in head
    for name in ("accuracy.png", "accuracy_virtual_seconds.png", "accuracy_updates.png"):
        assert (tmp_path / "x" / name).is_file()
    assert "target,reached" in (tmp_path / "x/summary.csv").read_text()
