"""benchmarks/scaling.py with few workers and rounds."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedsim

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scaling(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return __import__("scaling")


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
