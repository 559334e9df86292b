from __future__ import annotations

import pytest


def quick_tables():
    return {
        "name": "quick",
        "rounds": 2,
        "workers": 3,
        "model": "logistic",
        "data": "tests.components:tiny",
        "local": {"batch_size": 16, "lr": 0.05},
    }


@pytest.fixture
def quick():
    """A quick experiment that leaves open with which engine it runs, as nested tables."""
    return quick_tables()


@pytest.fixture
def serial(quick):
    """The same in this process, one run after another."""
    return {**quick, "engine": "serial"}
