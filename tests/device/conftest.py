from __future__ import annotations

import pytest

from tests.device.pretend import pretend_gpu


@pytest.fixture
def gpu():
    """The pretend GPU, for as long as a test runs."""
    with pretend_gpu() as gpu:
        yield gpu
