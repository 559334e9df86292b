from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import pytest

import fedsim
from fedsim.comparison import displays as of_comparisons
from fedsim.runs.terminal import Display, progress_bar


class Terminal(io.StringIO):
    """A stderr that somebody watches."""

    def isatty(self):
        return True


def watched(monkeypatch):
    """Put a terminal in the place of stderr: here and not in a fixture, after which pytest would replace it."""
    monkeypatch.setattr(sys, "stderr", Terminal())
    return sys.stderr


def test_the_bar_shows_the_time_left(monkeypatch):
    terminal = watched(monkeypatch)
    with progress_bar(4, quiet=False) as bar:
        bar.update(2)
        bar.refresh()
    assert "2 of 4 rounds" in terminal.getvalue()
    assert " left" in terminal.getvalue()


def test_there_is_no_bar_where_nobody_watches(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress_bar(4, quiet=False) as bar:
        bar.update(2)
    assert sys.stderr.getvalue() == ""


def test_the_time_left_of_a_resumed_run_does_not_count_earlier_rounds(monkeypatch, tiny_experiment, tmp_path):
    watched(monkeypatch)
    experiment = {**tiny_experiment, "rounds": 2, "checkpoint": {"every": 1}}
    fedsim.run(experiment, tmp_path / "run")
    with Display(fedsim.Experiment(rounds=4), None, quiet=False) as display:
        states = []

        def on_start(prepared):
            display.start(prepared)
            states.append((display._bar.n, display._bar.initial))

        fedsim.run({**experiment, "rounds": 4}, tmp_path / "run", resume=True, on_start=on_start)
    assert states == [(2, 2)], "the rate is (n - initial) / seconds"


def test_the_rounds_that_a_failed_run_has_left_are_not_counted_as_done(monkeypatch):
    """They need no time, so as done rounds they would make those to come look faster than they are."""
    watched(monkeypatch)
    display = of_comparisons.GridDisplay(None, quiet=False)
    runs = [SimpleNamespace(id=name, experiment=SimpleNamespace(rounds=10)) for name in ("a", "b")]
    grid = SimpleNamespace(name="x", shape="2 seed", runs=runs, left_out=[])
    with display:
        display.on_start(grid, runs, 1)
        display.on_round(runs[0], {})
        display.on_end(SimpleNamespace(id="a", error="failed"))
        assert (display._bar.n, display._bar.total) == (1, 11)


@pytest.mark.parametrize(
    ("every", "told"), [(1, "continue after round 1 with"), (0, "there is no checkpoint yet; start")]
)
def test_an_interrupted_run_tells_where_a_resumed_one_starts(every, told, tiny_experiment, tmp_path, capsys):
    def interrupt(record):
        if record["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fedsim.run(
            {**tiny_experiment, "rounds": 5, "checkpoint": {"every": every}},
            tmp_path / "run",
            progress=True,
            on_round=interrupt,
        )
    assert told in capsys.readouterr().out


def test_the_first_line_comes_before_the_first_step_of_the_setup(tiny_experiment, capsys):
    printed = []
    fedsim.run(tiny_experiment, progress=True, on_setup=lambda step: printed.append(capsys.readouterr().out))
    (first,) = printed[0].splitlines()
    assert "3 workers; 2 rounds" in first
    assert not any(printed[1:])


def test_a_run_reports_each_step_of_its_setup(tiny_experiment):
    steps, started = [], []
    fedsim.run(tiny_experiment, on_setup=steps.append, on_start=lambda prepared: started.append(len(steps)))
    assert [step.split()[0] for step in steps] == ["starting", "making", "loading", "partitioning", "getting"]
    assert started == [5]
