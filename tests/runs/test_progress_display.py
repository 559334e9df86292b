"""What `run` and `compare` show in Python."""

from __future__ import annotations

import pytest

import fedsim
from tests.commands import ended, start


def test_a_run_is_silent_or_shows_a_line_for_each_round(tiny_experiment, tmp_path, capsys):
    fedsim.run(tiny_experiment)
    assert capsys.readouterr().out == ""
    fedsim.run(tiny_experiment, progress=True, rounds=2)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["1", "2", "final"]


def test_a_run_that_ends_early_says_what_is_left_only_if_there_is_a_folder(tiny_experiment, tmp_path, capsys):
    def stop(record):
        raise KeyboardInterrupt

    for out in (None, tmp_path / "run"):
        with pytest.raises(KeyboardInterrupt):
            fedsim.run(tiny_experiment, out, on_round=stop, progress=True)
        assert ("--resume" in capsys.readouterr().out) == (out is not None)


def test_a_comparison_is_silent_or_shows_a_line_for_each_run(tiny_experiment, capsys):
    grid = {"seed": [0, 1]}
    comparison = fedsim.compare(tiny_experiment, grid, rounds=1)
    assert capsys.readouterr().out == ""
    assert [len(run.history) for run in comparison.runs] == [1, 1]
    fedsim.compare(grid=grid, progress=True, **{**tiny_experiment, "rounds": 1})
    assert "[2/2] seed1: accuracy" in capsys.readouterr().out


def test_results_have_a_short_repr(tiny_experiment, tmp_path):
    result = fedsim.run(tiny_experiment, tmp_path / "run", name="short")
    assert repr(result).startswith("Result(short: test accuracy 0.")
    assert repr(result).endswith(f" s, in {tmp_path / 'run'})")
    comparison = fedsim.compare(tiny_experiment, {"seed": [0, 1]}, name="pair")
    assert repr(comparison) == "Comparison(pair: 2 runs (2 seed); see .table)"


def test_runs_take_no_semaphore_for_their_display(tiny_experiment, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import fedsim; from tqdm import std\n"
        f"fedsim.run({tiny_experiment}, rounds=1, progress=True)\n"
        "print(hasattr(std.TqdmDefaultWriteLock, 'mp_lock'))"
    )
    _, [out], _ = ended([start(script, cwd=tmp_path)])
    assert out.splitlines()[-1] == "False"
