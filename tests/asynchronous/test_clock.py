"""The virtual clock: its queue, event order, time, traffic, computed work and conserved sums."""

from __future__ import annotations

from collections import Counter

import pytest

from fedsim.asynchronous.dispatch import Scheduler
from fedsim.clients.schedule import Schedule
from fedsim.core.randomness import numpy_generator
from fedsim.errors import ExperimentError
from tests.asynchronous.simulated import delays_of, policy_of, simulate

HETEROGENEOUS = [1.0, 1.9, 2.7, 4.3, 6.1, 8.0]
WORKERS = len(HETEROGENEOUS)
DELAYS = {
    "constant, of distinct speeds": lambda: delays_of([1.0, 1.1234, 1.2817, 1.3719, 1.4141, 1.5713]),
    "exponential": lambda: delays_of([1.0] * WORKERS, "shifted_exponential"),
    "Pareto": lambda: delays_of([1.0] * WORKERS, "pareto", alpha=1.5),
    "lognormal, eightfold": lambda: delays_of(HETEROGENEOUS, "lognormal"),
}
ALWAYS_BUSY = {
    "asgd": {},
    "hogwild": {},
    "fedasync": {},
    "ssp": {"s": "inf"},
    "staleness_aware": {},
    "dc_asgd": {},
    "k_async": {"k": 1},
    "async_local_sgd": {},
}


def total_staleness(run):
    return sum(arrival.staleness for arrival in run.arrivals) + run.in_flight()


# Conservation


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("name", ALWAYS_BUSY)
def test_staleness_is_conserved(name, delays):
    """N always-busy workers: after T updates the staleness of applied and in-flight work sums to (N - 1) T."""
    run = simulate(policy_of(name, **ALWAYS_BUSY[name]), DELAYS[delays]())
    for applies in range(1, 101):
        assert run.clock.advance() == 1, "no ties"
        assert run.server.version == applies
        assert total_staleness(run) == (WORKERS - 1) * applies


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("k", [1, 2, 4, 9])
def test_staleness_with_a_buffer_is_conserved(delays, k):
    """With M busy workers and V versions, staleness sums to (M - 1) V, so the mean over K V results is (M - 1) / K."""
    run = simulate(policy_of("fedbuff", k=k), DELAYS[delays]())
    for taken in range(1, 101):
        assert run.clock.advance() == 1, "no ties"
        assert run.server.version == taken // k
        assert total_staleness(run) == (WORKERS - 1) * run.server.version
        assert run.server.policy.buffered(run.server) == taken % k


# Order


def test_all_arrivals_of_one_time_are_taken_before_a_worker_starts_again():
    run = simulate(policy_of("asgd"), delays_of([1.0, 1.0, 2.0]))
    assert [run.clock.advance() for _ in range(4)] == [2, 3, 2, 3]
    assert [arrival.slot for arrival in run.arrivals] == [0, 1, 0, 1, 2, 0, 1, 0, 1, 2]
    assert run.times == [1, 1, 2, 2, 2, 3, 3, 4, 4, 4]
    assert [arrival.staleness for arrival in run.arrivals] == [0, 1, 0, 1, 4, 0, 1, 0, 1, 4]
    assert [arrival.unit for arrival in run.arrivals] == [0, 0, 1, 1, 0, 2, 2, 3, 3, 1]


def test_results_do_not_depend_on_when_work_is_computed():
    """Compare computing each work item on arrival with computing all work in flight at once."""
    for name, params in (
        ("asgd", {"n_fetch": 2, "n_push": 3}),
        ("fedbuff", {"k": 2}),
        ("ssp", {"s": 1}),
        ("dc_asgd", {}),
        ("easgd", {"period": 2}),
        ("gossip", {}),
        ("d_psgd", {}),
        ("ad_psgd", {}),
        ("fedasync", {}),
    ):
        for buffers in ("average", "local", "frozen"):
            rows = []
            for lazy in (False, True):
                run = simulate(
                    policy_of(name, **params),
                    delays_of([1.0, 2.3, 3.1], "lognormal"),
                    buffers=buffers,
                    global_buffers=[0.0, 5.0],
                )
                if lazy:
                    run.server.policy.__class__.arrivals_needed = lambda self, server: 0
                run.advance(50)
                if lazy:
                    assert all(len(items) == 1 for items in run.trained)
                else:
                    assert max(map(len, run.trained)) == 3
                run.server.policy.publish(run.server)
                rows.append((run.row.tolist(), run.server.shared.server.buffers.tolist()))
            assert rows[0] == rows[1], (name, buffers)


# Time and traffic


def test_virtual_seconds_by_hand():
    """Worker 0 takes 1 s a step, worker 1 takes 2 s; latency 0.5 s, models of 30 bytes at 20 bytes per second."""
    delays = delays_of([1.0, 2.0])
    delays = type(delays)(delays.slowdowns, delays.noise, 0, 1.0, 0.5, 20.0)
    run = simulate(policy_of("asgd"), delays, models=30.0)  # one model download and one gradient upload: 3 s
    run.advance(4)
    assert run.times == [4.5, 5.5, 9.0, 11.0]
    run = simulate(policy_of("fedasync"), delays, models=30.0)  # 3 steps
    run.advance(2)
    assert run.times == [6.5, 9.5]
    run = simulate(policy_of("asgd", n_fetch=2, n_push=3), delays, models=30.0)
    run.advance(12)
    mine = [time for time, arrival in zip(run.times, run.arrivals, strict=True) if arrival.slot == 0]
    took = [after - before for before, after in zip([0, *mine], mine, strict=False)]
    down_only, neither, both = 1 + 0.5 + 1.5, 1.0, 1 + 0.5 + 3.0
    assert took[:6] == [down_only, neither, both, neither, down_only, down_only]  # the last of them: up only


# Cancelled work


def test_tied_arrivals_beyond_k_are_neither_taken_nor_computed():
    run = simulate(policy_of("k_sync", k=2), delays_of([1.0] * 5))
    run.advance(8)
    assert run.server.version == 4
    assert [arrival.slot for arrival in run.arrivals] == [0, 1] * 4
    assert [[item.slot for item in items] for items in run.trained] == [[0, 1]] * 4
    assert run.clock.dispatcher.stats.cancelled.total() == 12
    assert run.clock.dispatcher.stats.down == 20
    assert run.clock.dispatcher.stats.up == 8


@pytest.mark.parametrize("name", ["asgd", "fedasync"])
def test_work_that_arrives_after_the_end_is_not_computed(name):
    """Worker 3 is so slow that at most one of 10 results is its own, which is computed together with the first."""
    delays = [1.0, 1.1234, 1.2817, 1000.0]
    known, endless = (
        simulate(policy_of(name), delays_of(delays), total_items=pieces).advance(10) for pieces in (10, 1e9)
    )
    assert known.row.tolist() == endless.row.tolist()
    assert known.arrivals == endless.arrivals
    computed = [sum(map(len, run.trained)) for run in (known, endless)]
    assert computed == [11, 13]
    all_tied = simulate(policy_of(name), delays_of([1.0] * 4), total_items=6).advance(6)
    assert len(all_tied.arrivals) == sum(map(len, all_tied.trained)) == 8, "all tied arrivals are taken"


def test_cancelled_work_starts_again_with_the_new_model():
    """Worker 2 is cancelled twice and restarts its first batch each time."""
    run = simulate(policy_of("backup_workers", backups=1), delays_of([1.0, 1.0, 1.5]))
    run.advance(4)
    assert run.clock.now == 2.0
    run.clock._departures = {0: 0.0}  # from now on worker 2 must contribute
    run.advance(2)
    assert run.clock.now == 3.5
    last = {item.worker: item for items in run.trained for item in items}[2]
    assert (last.round, last.step) == (1, 0)


# Departures


def test_unfinished_work_of_a_departed_worker_never_arrives():
    run = simulate(policy_of("asgd"), delays_of([1.0, 2.0, 100.0]), departures={0: 3.5, 1: 4.0, 2: 3.9})
    with pytest.raises(ExperimentError) as caught:
        run.advance(100)
    assert [(arrival.slot, when) for arrival, when in zip(run.arrivals, run.times, strict=True)] == [
        *[(0, 1.0), (0, 2.0), (1, 2.0), (0, 3.0), (1, 4.0)]
    ]
    assert run.clock.dispatcher.stats.cancelled.total() == 3
    assert run.clock.dispatcher.stats.samples == Counter({0: 10, 1: 8})
    assert caught.value.lines == (
        "policy: deadlock at 4 virtual seconds, because no worker is busy and the policy lets no worker start: "
        "3 of 3 workers have left; let fewer leave (clock.departures)",
    )
    trained = Counter(item.worker for items in run.trained for item in items)
    assert trained == Counter({0: 3, 1: 2}), "lost work is not computed"


def test_a_cancelled_departure_is_decided_again_by_the_next_work():
    """Worker 1 would leave at 10 in its first step, which is cancelled at 1; its second step takes 0.5 s."""
    run = simulate(policy_of("k_sync", k=1), delays_of([1.0, 1.0]), departures={1: 10.0})
    times = {(0, 0): 1.0, (1, 0): 100.0, (0, 1): 3.0, (1, 1): 0.5}
    run.clock._duration = lambda item, unit, models: times[item.worker, unit]
    run.advance(2)
    assert [arrival.slot for arrival in run.arrivals] == [0, 1]
    assert run.times == [1.0, 1.5]
    assert run.server.alive.tolist() == [0, 1]


def test_too_few_workers_for_an_update_raise_an_error():
    run = simulate(policy_of("k_sync", k=2), delays_of([1.0, 1.0, 1.0]), departures={1: 2.5, 2: 2.5})
    with pytest.raises(
        ExperimentError, match="at 3 virtual seconds, because no worker .* lets no worker start: 2 of 3"
    ):
        run.advance(100)
    assert run.server.version == 2
    assert run.server.policy.buffered(run.server) == 1


def test_free_slots_draw_their_workers_in_order():
    """Three of six workers train at the same time. The k-th draw is for slot k."""
    run = simulate(policy_of("fedbuff", k=3), delays_of([1.0] * 3), seed=1)
    run.clock._duration = lambda item, unit, moved: 1.0
    run.clock.dispatcher.scheduler = Scheduler(1, 6, 3, "model", Schedule(4), lambda worker: 10)
    drawn = []
    for draw in range(3):
        rng = numpy_generator(1, "dispatch", draw)
        drawn.append(next(worker for worker in iter(lambda rng=rng: int(rng.integers(6)), None) if worker not in drawn))
    run.advance(1)
    assert [(item.slot, item.worker) for item in run.trained[0]] == list(enumerate(drawn))
    assert drawn != sorted(drawn)


def test_the_train_loss_is_the_mean_over_samples():
    """The losses of workers 0 and 1 are 0 and 1. Worker 0 takes batches of 4, 4 and 2 while worker 1 takes one of 4."""
    run = simulate(policy_of("asgd"), delays_of([1.0, 2.0])).advance(4)
    stats = run.clock.dispatcher.stats
    assert stats.samples == {0: 4 + 4 + 2, 1: 4}
    assert stats.train_loss == 4 / 14
