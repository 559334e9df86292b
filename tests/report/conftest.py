from __future__ import annotations

import pytest

from tests.report.folders import write_comparison, write_run


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """Return the folder of a real run, which must not be changed."""
    return write_run(tmp_path_factory.mktemp("report") / "run", byzantine=[1])


@pytest.fixture(scope="session")
def comparison_folder(tmp_path_factory):
    """Return the folder of a real comparison (two rules, two rates, three seeds), which must not be changed."""
    return write_comparison(tmp_path_factory.mktemp("report") / "comparison")


@pytest.fixture
def fresh_run(tmp_path):
    """Return the folder of a made-up run of three rounds, which a test may change."""
    from tests.report.folders import invent_run

    return invent_run(tmp_path / "made-up", accuracies=[0.5, 0.7, 0.6])
