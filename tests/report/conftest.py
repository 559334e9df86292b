from __future__ import annotations

import pytest

from tests.report.folders import write_comparison, write_run


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory):
    """The folder of a real run. Do not change it."""
    return write_run(tmp_path_factory.mktemp("report") / "run", byzantine=[1])


@pytest.fixture(scope="session")
def comparison_folder(tmp_path_factory):
    """The folder of a real comparison of two rules, two learning rates and three seeds. Do not change it."""
    return write_comparison(tmp_path_factory.mktemp("report") / "comparison")


@pytest.fixture
def fresh_run(tmp_path):
    """The folder of a made-up run of three rounds, which a test may change."""
    from tests.report.folders import invent_run

    return invent_run(tmp_path / "made-up", accuracies=[0.5, 0.7, 0.6])
