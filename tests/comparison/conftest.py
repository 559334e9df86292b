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
        "records": {"figures": []},  # a picture takes 0.1 s
    }


@pytest.fixture
def quick():
    """Return a quick experiment as nested tables, without an engine."""
    return quick_tables()


@pytest.fixture
def serial(quick):
    """Return a quick experiment as nested tables, to be run one run after another in this process."""
    return {**quick, "engine": "serial"}
