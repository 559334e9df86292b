"""Settings of policies that are refused; more of them are in the docstrings of the policies."""

from __future__ import annotations

import pytest

from fedsim.errors import ExperimentError
from tests.asynchronous.simulated import policy_of


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        ("k_sync", {"k": 5}, "policy.k = 5: must be at most 4, the workers at work"),
        ("backup", {"backups": 4}, "policy.backups = 4: must be less than 4, the workers at work"),
        ("fedasync", {"b": 1}, 'policy.b = 1: goes with policy.staleness = "hinge"'),
        ("fedasync", {"staleness": "constant", "a": 2.0}, 'policy.a = 2: goes with policy.staleness = "hinge" or "pol'),
    ],
)
def test_impossible_settings_are_refused(name, params, message):
    with pytest.raises(ExperimentError, match=message):
        policy_of(name, **params).check(4)
