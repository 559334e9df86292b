from __future__ import annotations

import numpy as np
import pytest
import torch


@pytest.fixture
def case():
    """A row [7] and updates [6, 7] of sizes from 0.001 to 1000, with a zero and two equal rows."""
    rng = np.random.default_rng(0)
    updates = rng.standard_normal((6, 7)) * 10.0 ** np.arange(-3, 4)
    updates[2, 3] = 0
    updates[4] = updates[3]
    return torch.from_numpy(rng.standard_normal(7)), torch.from_numpy(updates)
