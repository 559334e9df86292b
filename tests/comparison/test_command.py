from __future__ import annotations

import os
import re
import signal
import time

import pytest

from fedsim.callbacks.display import DRAWING
from fedsim.comparison.plan import plan_comparison
from tests.commands import assert_none_left, processes_of_group, read_until, run_on_a_terminal, start

QUICK = ["name=quick", "model=logistic", "data=tests.components:tiny", "workers=3", "rounds=2"]
SERIAL = [*QUICK, "engine=serial"]


@pytest.mark.usefixtures("pictures")
def test_it_prints_a_line_per_run_the_table_and_the_folder(cli, tmp_path):
    done = cli("compare", *SERIAL, "aggregate.rule=mean,weighted_mean", "seed=0,1")
    assert done.exit_code == 0, done.output
    lines = [line for line in done.stdout.splitlines() if line != DRAWING]  # which slow machines print
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


ALIE = "alie: z = 0 for n = 5, f = 1: this attack does nothing; set "


@pytest.mark.filterwarnings("default")
def test_the_warnings_of_a_dry_run_are_those_of_the_run_and_are_below_the_table(cli, tmp_path):
    words = [*SERIAL, "workers=5", "rounds=1", "aggregate.rule=mean,median", "seed=0,1"]
    one, several = "attack.z=1.5", """attack='{name="alie",z=1.5},ipm' instead of attack.name"""
    grid = ("alie,ipm", f"aggregate.rule=mean attack.name=alie seed=0: {ALIE}{several} (and 3 more of 8 runs)")
    for attacks, warning in (("alie", ALIE + one), grid):
        planned = cli("compare", *words, "attack.f=1", f"attack.name={attacks}", "--dry-run")
        assert (planned.exit_code, planned.stderr) == (0, f"warning: {warning}\n")
    done = cli("compare", *words, "attack.f=1", "attack.name=alie,ipm", "--out", "x", "records.figures=[]")
    assert done.stderr == planned.stderr
    again = cli("compare", "x", "--allow-imports")
    for text in (done.stdout, again.stdout, (tmp_path / "x" / "summary.txt").read_text()):
        assert " ".join(text.split()).count(f"warning: {grid[1]}") == 1
    cli("report", "x")
    assert "this attack does nothing" in (tmp_path / "x" / "report.html").read_text()
    advised = cli("compare", *words, "attack.f=1", 'attack={name="alie",z=1.5},ipm', "--dry-run")
    assert (advised.exit_code, advised.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["attack.name=alie,ipm", "attack.f=1", "attack.z=1"],
            "error: attack.name=ipm: attack.z = 1: unknown key (the attack is ipm); write "
            """attack='{name="alie",z=1},ipm' instead of attack.name and attack.z\n""",
        ),
        (
            ['partition=iid,{name="dirichlet",min_samples=1}', "partition.alpha=0.1"],
            "error: partition=iid: partition.alpha = 0.1: unknown key (the partition strategy is iid); write "
            """partition='iid,{name="dirichlet",min_samples=1,alpha=0.1}' instead of partition.alpha\n""",
        ),
    ],
)
def test_advice_on_a_parameter_is_correct_for_an_axis_of_components(cli, words, message):
    result = cli("compare", *SERIAL, *words, "--dry-run")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize(
    ("words", "warnings"),
    [
        (["attack.name=alie,ipm"], ["attack.name has no effect with no Byzantine workers (set attack.f); omit it"]),
        (["attack.f=0,1", "attack.name=ipm"], []),
        (["aggregate.rule=mean,krum", "aggregate.f=0"], []),
        (
            ["aggregate.rule=mean,median", "aggregate.f=1"],
            ["aggregate.f has no effect with aggregate.rule=mean; omit it"],
        ),
        (
            ["workers=4,12", "attack.fraction=0.1", "attack.name=ipm"],
            [
                "workers=4: attack.fraction = 0.1: is less than one of 4 workers, so there is no attack; use a larger "
                "fraction, or more workers"
            ],
        ),
    ],
)
def test_a_setting_without_effect_in_all_runs_that_set_it_is_a_warning(words, warnings):
    assert plan_comparison(None, None, ["model=logistic", "rounds=1", *words]).warnings == warnings


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
