from __future__ import annotations

import gc
import multiprocessing

import pytest

from fedsim.processes import child_process
from tests.device.agreement import REAL
from tests.device.pretend import pretend_gpu


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """Exclude the objects that exist now from the collections by which each run frees memory of a GPU."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def gpu():
    """Yield the pretend GPU for one test, even if there is a real GPU."""
    with pretend_gpu() as gpu:
        yield gpu


if REAL:

    @pytest.fixture(autouse=True)
    def spawned(monkeypatch):
        """Spawn fedsim's processes, as programs do: a fork of the test server may be unable to use CUDA."""
        monkeypatch.setattr(child_process, "get_context", multiprocessing.get_context)

    @pytest.fixture
    def nothing_stays_behind():
        """Replace the check of the same name: CUDA IPC keeps a file of counters as long as this process lives."""
