from __future__ import annotations

import multiprocessing

import pytest

from fedsim.system import child_process
from tests.device.agreement import REAL
from tests.device.pretend import pretend_gpu


@pytest.fixture
def gpu():
    """The pretend GPU, for as long as a test runs, also where there is a real one."""
    with pretend_gpu() as gpu:
        yield gpu


if REAL:

    @pytest.fixture(autouse=True)
    def spawned(monkeypatch):
        """Spawn the processes of fedsim, as programs do: a fork of the tests' server might not be able to use CUDA."""
        monkeypatch.setattr(child_process, "get_context", multiprocessing.get_context)

    @pytest.fixture
    def nothing_stays_behind():
        """In place of the fixture of all tests: CUDA IPC keeps a file of counters as long as this process lives."""
