from __future__ import annotations

import gc

import pytest

from tests.device.pretend import pretend_gpu


@pytest.fixture
def gpu():
    """The pretend GPU, for as long as a test runs."""
    with pretend_gpu() as gpu:
        yield gpu


@pytest.fixture(scope="package", autouse=True)
def imported_libraries_stay():
    """Spare the collections at the end of each run on a GPU the objects of libraries, which take most of their time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
