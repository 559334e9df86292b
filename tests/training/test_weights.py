"""Weights of workers that are drawn with known probabilities."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from fedsim.training.weights import set_cohort_weights, weights_by_probability


def test_workers_have_the_weights_of_the_latest_cohort_and_others_have_1():
    cohort = SimpleNamespace(workers=torch.zeros(3, dtype=torch.int64), weights=torch.zeros(3, dtype=torch.double))
    shared = SimpleNamespace(cohort=cohort)
    set_cohort_weights(shared, {7: 2.0, 4: 3.0, 9: 5.0})
    assert weights_by_probability(shared, [9, 4, 1, 20]).tolist() == [5.0, 3.0, 1.0, 1.0]
    set_cohort_weights(shared, {5: 4.0})
    assert weights_by_probability(shared, [5, 7, 9, 20]).tolist() == [4.0, 1.0, 1.0, 1.0]
