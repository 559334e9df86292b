from __future__ import annotations

import pytest
import torch


@pytest.fixture
def honest():
    return torch.randn(7, 33, dtype=torch.double, generator=torch.Generator().manual_seed(0)) + 0.3


@pytest.fixture
def own_updates():
    return torch.randn(3, 33, dtype=torch.double, generator=torch.Generator().manual_seed(1))
