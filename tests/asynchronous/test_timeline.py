"""What each worker does in a round on the virtual clock: its records, its figure, its table and its report."""

from __future__ import annotations

import pytest

from fedsim.asynchronous.policies import policy
from tests.asynchronous.simulated import delays_of, policy_of, simulate
from tests.device.agreement import settings_of

SMALL = {"data": {"name": "tests.components:tiny", "train": 40}, "model": "tests.models:Normalised", "engine": "serial"}
SMALL |= {"workers": 5, "local": {"batch_size": 4}}
ALONE = {"ad_psgd", "gossip", "d_psgd"}  # policies that need at least two workers
FASTER_AND_SLOWER = {"slowdown": {"name": "linear", "ratio": 4}, "noise": "lognormal"}


def timeline(run, round):
    """Simulate the next round, and return its record."""
    run.clock.dispatcher.start_round(round)
    run.clock.run_round(round)
    return run.clock.timeline


def test_cancelled_work_and_a_departure_by_hand():
    """The first 2 of 3 gradients make an update, so worker 2 (4 s a step) is cancelled until worker 0 leaves at 12.5 s.

    Round 1 ends with the 9th result at 9 s, and round 2 with the 18th at 24 s.
    """
    run = simulate(policy_of("k_sync", k=2), delays_of([1, 2, 4]), departures={0: 12.5})
    common = {"workers": [0, 1, 2], "staleness": [0] * 3}
    first = {"training": [5, 9, 9], "waiting": [4, 0, 0], "used": [5, 4, 0], "dropped": [0, 0, 4]}
    second = {"training": [1.5, 9, 15], "waiting": [2, 6, 0], "used": [1, 5, 3], "dropped": [1, 0, 2]}
    assert [timeline(run, round) for round in (1, 2)] == [common | first, common | second]
    assert timeline(run, 3).workers == [1, 2]


def test_work_counts_in_every_round_in_which_it_lasts():
    """Rounds of workers 0 and 1 take 3 s and 6 s. That of worker 2 takes 24 s, and ends in the fourth round."""
    run = simulate(policy_of("fedasync"), delays_of([1, 2, 8]))
    records = [timeline(run, round) for round in range(1, 5)]
    assert [record.training for record in records] == [[6, 6, 6]] * 4
    assert [record.used for record in records] == [[2, 1, 0]] * 3 + [[2, 1, 1]]
    assert records[-1].staleness == [0, 2, 12]
    assert [record.workers for record in records] == [[0, 1, 2]] * 4


@pytest.mark.parametrize("name", [registration.name for registration in policy if registration.name != "sync"])
def test_training_and_waiting_make_up_the_round(name):
    run = simulate(policy_of(**settings_of(policy.get(name))), delays_of([1.0, 1.3, 1.9, 3.2, 6.1], "lognormal"))
    begun = 0.0
    for round in range(1, 7):
        record = timeline(run, round)
        for training, waiting in zip(record.training, record.waiting, strict=True):
            assert training + waiting == pytest.approx(run.clock.now - begun, abs=1e-9)
        begun, stats = run.clock.now, run.clock.dispatcher.stats
        assert record.workers == [0, 1, 2, 3, 4]
        assert (sum(record.used), sum(record.dropped)) == (stats.staleness.total(), stats.cancelled.total())
        stale = sum(used * mean for used, mean in zip(record.used, record.staleness, strict=True))
        assert stale == pytest.approx(sum(tau * count for tau, count in stats.staleness.items()))
