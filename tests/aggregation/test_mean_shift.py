"""Mean shift finds the clusters of scikit-learn."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.cluster import MeanShift, estimate_bandwidth

from fedsim.aggregation.mean_shift import ROUNDING, bandwidth_of, mean_shift


def shares(seed):
    """Shares of positive, zero and negative values of 3 to 40 rows, in one to three groups."""
    rng = np.random.default_rng(seed)
    groups = [rng.dirichlet(np.full(3, 10.0 ** rng.integers(-1, 2))) for _ in range(rng.integers(1, 4))]
    counted = int(10.0 ** rng.integers(1, 4))
    rows = [rng.multinomial(counted, groups[rng.integers(len(groups))]) for _ in range(rng.integers(3, 41))]
    return np.array(rows) / counted


@pytest.mark.filterwarnings("ignore:Binning data failed")
@pytest.mark.parametrize("first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(25, 400, 25))])
def test_bandwidth_and_labels_are_those_of_scikit_learn(first):
    several = 0
    for seed in range(first, first + 25):
        points = shares(seed)
        bandwidth = bandwidth_of(points)
        assert bandwidth == pytest.approx(estimate_bandwidth(points, quantile=0.5), abs=1e-12)
        if bandwidth > 1e-9:
            expected = (
                MeanShift(bandwidth=(1 + ROUNDING) * bandwidth, bin_seeding=True, cluster_all=False).fit(points).labels_
            )
            assert mean_shift(points, bandwidth).tolist() == expected.tolist(), seed
            several += expected.max() > 0
    assert several > 5
