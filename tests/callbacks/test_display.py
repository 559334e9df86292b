"""Terminal output of runs and comparisons."""

from __future__ import annotations

import io
import math
import re
import sys
from types import SimpleNamespace

import pytest

import fedsim
from fedsim.callbacks.display import Display, announcement
from fedsim.comparison import displays as of_comparisons
from fedsim.records.figures import draw_curve
from fedsim.records.record import RoundRecord
from fedsim.records.round_table import columns_of, table_header, table_line
from tests.commands import ended, start

SYNCHRONOUS = "round  accuracy  test loss  train loss  broadcast s   train s  aggregate s    test s"
ON_CLOCK = "round  accuracy  test loss  train loss  virtual s"


def watched(monkeypatch):
    """Replace stderr by a terminal and return it. (Pytest would replace stderr again after a fixture.)"""
    terminal = io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


def test_the_time_left_of_a_resumed_run_does_not_count_earlier_rounds(monkeypatch, tiny_experiment, tmp_path):
    watched(monkeypatch)
    experiment = {**tiny_experiment, "checkpoint.every": 1}
    fedsim.run(experiment, tmp_path / "run")

    class Looking(fedsim.Callback):
        def on_start(self, run):
            with Display(fedsim.Experiment(rounds=4), None, quiet=False) as display:
                display.on_start(run)
                assert (display._bar.n, display._bar.initial) == (2, 2), "the rate is (n - initial) / seconds"

    fedsim.run(experiment, tmp_path / "run", rounds=4, resume=True, callbacks=[Looking()])


def test_the_rounds_that_a_failed_run_has_left_are_not_counted_as_done(monkeypatch):
    """These rounds take no time, so counting them would make the remaining rounds look too fast."""
    watched(monkeypatch)
    display = of_comparisons.ComparisonDisplay(None, quiet=False)
    runs = [SimpleNamespace(id=name, experiment=SimpleNamespace(rounds=10)) for name in ("a", "b")]
    with display:
        display.on_start(SimpleNamespace(name="x", shape="2 seed", runs=runs, left_out=[]), runs, 1)
        display.on_round(runs[0], {})
        display.on_end(SimpleNamespace(id="a", error="failed"))
        assert (display._bar.n, display._bar.total) == (1, 11)


@pytest.mark.parametrize(
    ("every", "told"), [(1, "continue after round 1 with"), (0, "there is no checkpoint yet; start"), (None, None)]
)
def test_an_interrupted_run_says_where_a_resumed_one_starts(every, told, tiny_experiment, tmp_path, capsys):
    def interrupt(record):
        if record.round == 2:
            raise KeyboardInterrupt

    tables, out = {**tiny_experiment, "rounds": 5, "checkpoint": {"every": every}}, tmp_path / "run" if told else None
    with pytest.raises(KeyboardInterrupt):
        fedsim.run(tables, out, progress=True, on_round=interrupt)
    printed = capsys.readouterr().out
    assert told in printed if told else "--resume" not in printed


def test_a_run_prints_what_is_run_before_its_setup_then_a_line_for_each_round(tiny_experiment, capsys):
    printed = []
    fedsim.run(tiny_experiment, progress=True, on_setup=lambda step: printed.append(capsys.readouterr().out))
    first, *others = "".join(printed).splitlines()
    assert "3 workers; 2 rounds" in first
    assert not others
    headline, *lines = capsys.readouterr().out.splitlines()
    assert headline.startswith("tests.components:tiny (203 train, 90 test), 2nn (")
    assert headline.endswith("; 67 to 68 samples each (iid); serial on cpu")
    assert [line.split()[0] for line in lines] == ["round", "1", "2", "final"]
    fedsim.run(tiny_experiment)
    assert capsys.readouterr().out == ""


def test_the_last_line_says_how_personal_models_are_tested(tiny_experiment, capsys):
    ditto = {"algorithm": "ditto", "batch_size": 16}
    fedsim.run({**tiny_experiment, "local": ditto}, progress=True)
    last = (
        "this is the result of the global model; data.local_test_fraction=0.2 also tests the workers' personal models"
    )
    assert capsys.readouterr().out.splitlines()[-1] == last
    tested = {"name": "tests.components:tiny", "local_test_fraction": 0.2}
    result = fedsim.run({**tiny_experiment, "rounds": 2, "local": ditto, "data": tested}, progress=True)
    lines = capsys.readouterr().out.splitlines()
    assert last not in lines
    heads, first, second = (re.split("  +", line.strip()) for line in lines[2:5])
    column = heads.index("worker accuracy")
    assert (first[column], float(second[column])) == ("-", pytest.approx(result.history[-1].worker_accuracy, abs=1e-4))
    fedsim.run({**tiny_experiment, "model": "2nn", "local": {"algorithm": "ifca", "k": 2}}, progress=True)
    several = last.replace("the global model", "the first of 2 global models")
    assert capsys.readouterr().out.splitlines()[-1] == several


def test_a_comparison_is_silent_or_shows_a_line_for_each_run(tiny_experiment, capsys):
    comparison = fedsim.compare(tiny_experiment, {"seed": [0, 1]}, rounds=1, name="pair")
    assert capsys.readouterr().out == ""
    assert repr(comparison) == "Comparison(pair: 2 runs (2 seed); see .table)"
    fedsim.compare(plan={"seed": [0, 1]}, progress=True, **{**tiny_experiment, "rounds": 1})
    assert "[2/2] seed1: accuracy" in capsys.readouterr().out


def test_a_result_has_a_short_repr(tiny_experiment, tmp_path):
    shown = repr(fedsim.run(tiny_experiment, tmp_path / "run", name="short"))
    assert shown.startswith("Result(short: test accuracy 0.")
    assert shown.endswith(f" s, in {tmp_path / 'run'})")


def test_runs_take_no_semaphore_for_their_display(tiny_experiment, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import fedsim; from tqdm import std\n"
        f"fedsim.run({tiny_experiment}, rounds=1, progress=True)\n"
        "print(hasattr(std.TqdmDefaultWriteLock, 'mp_lock'))"
    )
    _, [out], _ = ended([start(script, cwd=tmp_path)])
    assert out.splitlines()[-1] == "False"


def record(**more):
    phases = {"broadcast": 0.001, "train": 0.2794, "aggregate": 0.0, "test": 1.5}
    losses = {"round": 7, "test_loss": 1.22184, "test_accuracy": 0.745, "train_loss": 2.0249}
    return RoundRecord(**{**losses, "seconds": phases, **more})


def test_the_table_of_a_synchronous_run_has_its_phases_and_some_metrics_of_components():
    columns = columns_of(record())
    assert table_header(columns) == SYNCHRONOUS
    cells = ["7", "0.7450", "1.2218", "2.0249", "0.001", "0.279", "0.000", "1.500"]
    assert table_line(columns, record()).split() == cells
    assert len(table_line(columns, record())) == len(SYNCHRONOUS)
    first = record(metrics={f"m{number}": float(number) for number in range(9)}, test_loss=math.nan)
    assert table_header(columns_of(first)).split()[-4:] == ["m0", "m1", "m2", "m3"]
    assert table_line(columns_of(first), first).split()[2] == "-"


def test_the_table_of_a_run_on_the_clock_has_virtual_seconds_updates_and_staleness():
    assert table_header(columns_of(record(virtual_seconds=321.354))) == ON_CLOCK
    assert "lost" not in ON_CLOCK.split()
    assert "lost" in table_header(columns_of(record(race={"lost_fraction": 0.01}))).split()
    work = {"updates": 1025, "arrivals": 1030, "staleness": {"1": 3, "4": 1}, "buffered": 0, "discarded": 0}
    columns = columns_of(record(virtual_seconds=0.0, asynchronous={**work, "staleness": {}}))
    assert table_header(columns) == f"{ON_CLOCK}   updates  staleness"
    busy = record(virtual_seconds=321.354, asynchronous=work)
    assert table_line(columns, busy).split()[4:] == ["321.4", "1025", "1.75"]
    idle = record(virtual_seconds=1.0, asynchronous={**work, "updates": 0, "staleness": {}})
    assert table_line(columns, idle).split()[-2:] == ["0", "-"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "clock"}, "; weighted_mean of updates on the virtual clock (equal slowdowns, constant noise)"),
        (
            {"mode": "clock", "policy": "ssp", "clock": {"noise": "lognormal", "slowdown": "linear"}},
            "; ssp (s = 3) on the virtual clock (linear slowdowns, lognormal noise)",
        ),
        ({"mode": "clock", "policy": "fedbuff", "cohort": 2}, "3 workers, 2 at a time; "),
        (
            {"mode": "clock", "policy": {"name": "k_async", "k": 2}, "aggregate": "median"},
            "; median with k_async (k = 2) on",
        ),
        ({"cohort": 2}, "3 workers, 2 per round; 2 rounds; weighted_mean of updates"),
        ({"privacy": {"mechanism": "central", "clip": 1.0, "noise": 1.0}}, "; 2 rounds; mean of updates"),
        ({"sync": "post_local", "switch_after_round": 1}, "weighted_mean of gradients, of updates after round 1"),
        ({"attack": {"name": "ipm", "workers": [1]}}, "3 workers, 1 of them Byzantine (ipm); "),
        (
            {"groups": 3, "group_rounds": 2, "top_attack": {"name": "ipm", "f": 1}, "top_aggregate": "median"},
            "of updates in 3 groups (1 of them Byzantine: ipm), median of the groups every 2 rounds",
        ),
    ],
)
def test_the_first_line_names_mode_and_policy(tiny_experiment, change, words):
    assert words in announcement(fedsim.load_experiment({**tiny_experiment, **change}))


def test_the_curve_has_a_panel_for_virtual_seconds_where_there_are_such():
    for seconds, labels in (({}, ["round"] * 2), ({"virtual_seconds": 3.0}, ["round", "round", "virtual seconds"])):
        figure = draw_curve([record(round=1, **seconds), record(round=2, **seconds)], "x")
        assert [axes.get_xlabel() for axes in figure.axes] == labels
        assert figure.get_suptitle() == "x: test accuracy 0.7450 after 2 rounds"


def test_the_axis_of_a_single_round_has_whole_numbers():
    figure = draw_curve([RoundRecord(round=2, test_accuracy=0.5, test_loss=1.0)], "run")
    assert all(tick == int(tick) for axes in figure.axes for tick in axes.get_xticks())
