from __future__ import annotations

import pytest


@pytest.fixture(params=[pytest.param(25, id="few"), pytest.param(1_300, id="many", marks=pytest.mark.slow)])
def examples(request):
    """Number of inputs to try."""
    return request.param
