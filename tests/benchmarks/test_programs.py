"""Programs of benchmarks/ with few workers, rounds and images."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path

import pytest

import fedsim

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch):
    """Return a function that imports a program."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module


@pytest.fixture
def scaling(program):
    return program("scaling")


def test_the_timed_engine_gives_the_rows_of_serial(scaling):
    assert scaling.check_work(population=10**6, cohort=3, rounds=2) <= 1e-9


def test_different_rows_are_an_error(scaling, monkeypatch):
    monkeypatch.setattr(scaling, "TOLERANCE", -1.0)
    with pytest.raises(AssertionError, match="100 workers: rows differ by"):
        scaling.check_work(population=100, cohort=2, rounds=1)


@pytest.mark.slow
def test_the_figures_are_drawn(scaling, tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "PICTURE", tmp_path / "scaling.png")
    with fedsim.Session() as session:
        assert scaling.round_seconds(10**6, 2, 3, session) > 0
        assert scaling.start_seconds(10**6, session) > 0
    points = {"populations": (10, 100), "cohorts": (1, 2)}
    curves = {f"{name}_{what}": [1, 2] for name in ("population", "cohort") for what in ("seconds", "peak_mb")}
    scaling.draw({**points, **curves})
    assert (tmp_path / "scaling.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("changed", "stored"), [(None, "a1b2"), ("benchmarks/results/some-cpu.json", "a1b2"), ("fedsim.py", None)]
)
def test_figures_are_stored_only_for_committed_code(changed, stored, program, tmp_path, monkeypatch):
    common, results = program("common"), tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    for path in (tmp_path / "fedsim.py", results / "some-cpu.json"):
        path.write_text("before")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=Nobody", "-c", "user.email=nobody@localhost"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "All"]):
        subprocess.run([*git, *words], check=True)
    if changed:
        (tmp_path / changed).write_text("after")
    commit = f"a1b2{'+dirty' * bool(changed)}"
    monkeypatch.setattr(common, "describe_environment", lambda: {"git_commit": commit, "processor": "CPU"})
    monkeypatch.setattr(common, "ROOT", tmp_path)
    monkeypatch.setattr(common, "RESULTS", results)
    common.report("figures", seconds=1.0)
    path = results / "figures-cpu.json"
    assert (json.loads(path.read_text())["fedsim"] if path.exists() else None) == stored
