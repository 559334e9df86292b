"""The virtual clock: who begins and arrives when, what is computed, and sums that hold exactly."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

import pytest

from fedsim.asynchronous.desk import Journal
from fedsim.asynchronous.policies import Policy
from fedsim.errors import ExperimentError
from tests.asynchronous.driving import delays_of, driven, policy_of

HETEROGENEOUS = [1.0, 1.9, 2.7, 4.3, 6.1, 8.0]
WORKERS = len(HETEROGENEOUS)
DELAYS = {
    "constant, of distinct speeds": lambda: delays_of([1.0, 1.1234, 1.2817, 1.3719, 1.4141, 1.5713]),
    "constant, about eightfold": lambda: delays_of([1.0, 2**0.5, 3**0.5, 11**0.5, 30**0.5, 64.01**0.5]),
    "exponential": lambda: delays_of([1.0] * WORKERS, "shifted_exponential"),
    "Pareto": lambda: delays_of([1.0] * WORKERS, "pareto", alpha=1.5),
    "lognormal": lambda: delays_of([1.0] * WORKERS, "lognormal", sigma=1.0),
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


@dataclass(frozen=True)
class Counting(Policy):
    """Next to nothing: a new version."""

    def take(self, server, arrival):
        server.moved()


def total_staleness(run):
    return sum(arrival.staleness for arrival in run.arrivals) + run.in_flight()


# Conservation


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("name", ALWAYS_BUSY)
def test_staleness_is_conserved(name, delays):
    """What was applied and what is under way sum to (N - 1) T, after each of T applies by N always-busy workers."""
    run = driven(policy_of(name, **ALWAYS_BUSY[name]), DELAYS[delays]())
    for applies in range(1, 201):
        assert run.clock.advance() == 1, "no ties"
        assert run.server.version == applies
        assert total_staleness(run) == (WORKERS - 1) * applies


@pytest.mark.parametrize("delays", DELAYS)
@pytest.mark.parametrize("k", [1, 2, 4, 9])
def test_staleness_under_a_buffer_is_conserved(delays, k):
    """Concurrency M, V versions: (M - 1) V in all, so the mean staleness of K V deltas tends to (M - 1) / K."""
    run = driven(policy_of("fedbuff", k=k), DELAYS[delays]())
    for taken in range(1, 301):
        assert run.clock.advance() == 1, "no ties"
        assert run.server.version == taken // k
        assert total_staleness(run) == (WORKERS - 1) * run.server.version
        assert run.server.policy.held(run.server) == taken % k


def test_staleness_under_a_buffer_is_conserved_for_sampled_workers():
    run = driven(policy_of("fedbuff", k=3), delays_of([1.0] * 40, "lognormal"), slots=7)
    for _ in range(300):
        assert run.clock.advance() == 1, "no ties"
        assert total_staleness(run) == 6 * run.server.version


@pytest.mark.parametrize("speeds", [[1.0] * 5, [1.0, 1.0, 2.0, 2.0, 4.0], [1.0, 2.0, 3.0, 4.0, 6.0]])
def test_ties_take_off_a_pair_each(speeds):
    """Of m that arrive at one time none is under way for those taken after it: m (m - 1) / 2 less each time."""
    run, expected = driven(policy_of("asgd"), delays_of(speeds)), 0
    for _ in range(100):
        arrived = run.clock.advance()
        expected += (len(speeds) - 1) * arrived - arrived * (arrived - 1) // 2
        assert total_staleness(run) == expected
    assert expected < (len(speeds) - 1) * run.server.version


# Order


def test_all_that_arrives_at_a_time_is_taken_before_anybody_begins_anew():
    run = driven(policy_of("asgd"), delays_of([1.0, 1.0, 2.0]))
    assert [run.clock.advance() for _ in range(4)] == [2, 3, 2, 3]
    assert [arrival.slot for arrival in run.arrivals] == [0, 1, 0, 1, 2, 0, 1, 0, 1, 2]
    assert run.times == [1, 1, 2, 2, 2, 3, 3, 4, 4, 4]
    assert [arrival.staleness for arrival in run.arrivals] == [0, 1, 0, 1, 4, 0, 1, 0, 1, 4]
    assert [arrival.unit for arrival in run.arrivals] == [0, 0, 1, 1, 0, 2, 2, 3, 3, 1]


def test_members_say_which_round_and_step_their_work_is():
    """3 steps make a round of 10 samples in batches of 4."""
    run = driven(policy_of("asgd"), delays_of([1.0, 2.0])).go(10)
    mine = [member for members in run.trained for member in members if member.worker == 0]
    assert [(member.round, member.step) for member in mine[:7]] == [
        *[(1, 0), (1, 1), (1, 2)],
        *[(2, 0), (2, 1), (2, 2), (3, 0)],
    ]
    run = driven(policy_of("fedasync"), delays_of([1.0, 2.0])).go(5)
    mine = [member for members in run.trained for member in members if member.worker == 0]
    assert [(member.round, member.step, member.steps) for member in mine[:3]] == [(n, None, None) for n in (1, 2, 3)]


def test_free_workers_are_drawn_for_slots_in_their_order():
    """Of 50 workers for 3 slots of like speed: all that is random is who is drawn, as a roster draws."""
    run, reference = (driven(policy_of("fedbuff"), delays_of([1.0] * 50), slots=3) for _ in range(2))
    run.go(6)
    for members in run.trained:
        drawn = [reference.roster.next(slot) for slot in range(3)]
        assert [(member.slot, member.worker) for member in members] == [(m.slot, m.worker) for m in drawn]
        for member in drawn:
            reference.roster.done(member)


@pytest.mark.parametrize("name", ["asgd", "fedbuff", "gossip", "easgd", "k_async"])
def test_it_repeats_itself(name):
    def once():
        params = {"k": 2} if name == "k_async" else {}
        run = driven(policy_of(name, **params), delays_of([1.0, 2.0, 3.0], "lognormal")).go(60)
        return run.row.tolist(), run.arrivals, run.times

    assert once() == once()


def test_all_policies_meet_the_same_delays():
    """The first time that a worker takes for its first, second, ... step, whatever the policy."""

    def times(name, **params):
        asked, delays = {}, delays_of([1.0, 2.0, 3.0], "lognormal", seed=5)
        run = driven(policy_of(name, **params), delays)
        pace = run.clock._pace

        def noted(member, unit, models):
            asked[member.worker, unit] = pace(member, unit, models)
            return asked[member.worker, unit]

        run.clock._pace = noted
        run.go(40)
        return asked

    reference = times("asgd")
    for name, params in (("k_sync", {"k": 2}), ("ssp", {"s": 1}), ("gossip", {}), ("easgd", {"synchronous": True})):
        found = times(name, **params)
        common = found.keys() & reference.keys()
        assert len(common) > 10
        assert all(found[key] == reference[key] for key in common)


def test_when_work_is_computed_makes_no_difference():
    """Each piece at the last moment, or all that is under way at once."""
    for name, params in (
        ("asgd", {"n_fetch": 2, "n_push": 3}),
        ("fedbuff", {"k": 2}),
        ("ssp", {"s": 1}),
        ("dc_asgd", {}),
        ("easgd", {"period": 2}),
        ("gossip", {"graph": "complete"}),
        ("ad_psgd", {}),
        ("fedasync", {}),
    ):
        for buffers in ("average", "local", "server"):
            rows = []
            for lazy in (False, True):
                run = driven(
                    policy_of(name, **params),
                    delays_of([1.0, 2.3, 3.1], "lognormal"),
                    buffers=buffers,
                    global_buffers=[0.0, 5.0],
                )
                if lazy:
                    run.server.policy.__class__.wanted = lambda self, server: 0
                run.go(50)
                if lazy:
                    assert all(len(members) == 1 for members in run.trained)
                else:
                    assert max(map(len, run.trained)) == 3
                run.server.policy.publish(run.server)
                rows.append((run.row.tolist(), run.server.memory.global_buffers.tolist()))
            assert rows[0] == rows[1], (name, buffers)


# What things cost


def test_virtual_seconds_by_hand():
    """Steps of 2 s on worker 1 and 1 s on worker 0, 0.5 s of latency, models of 30 bytes at 20 bytes a second."""
    delays = delays_of([1.0, 2.0])
    delays = type(delays)(delays.speeds, delays.noise, 0, 1.0, 0.5, 20.0)
    run = driven(policy_of("asgd"), delays, models=30.0)  # one model down and one gradient up: 3 s
    run.go(4)
    assert run.times == [4.5, 5.5, 9.0, 11.0]
    run = driven(policy_of("fedasync"), delays, models=30.0)  # 3 steps
    run.go(2)
    assert run.times == [6.5, 9.5]
    run = driven(policy_of("asgd", n_fetch=2, n_push=3), delays, models=30.0)
    run.go(12)
    mine = [time for time, arrival in zip(run.times, run.arrivals, strict=True) if arrival.slot == 0]
    took = [after - before for before, after in zip([0, *mine], mine, strict=False)]
    down_only, nothing, both = 1 + 0.5 + 1.5, 1.0, 1 + 0.5 + 3.0
    assert took[:6] == [down_only, nothing, both, nothing, down_only, down_only]  # the last of them: up only


def test_the_journal_by_hand():
    """Worker 0 has 3 steps (4, 4 and 2 samples) by the time 3, worker 1 one; losses are the workers' numbers."""
    run = driven(policy_of("asgd", n_push=2), delays_of([1.0, 2.5]))
    for _ in range(4):
        run.clock.advance()
    assert run.clock.now == 3
    journal = run.clock.desk.journal
    assert journal.samples == Counter({0: 10, 1: 4})
    assert journal.loss_sum == 4
    assert journal.up == 1
    assert journal.down == 5  # those that arrived, and worker 1's second
    assert journal.staleness == Counter({0: 1})
    assert journal.wasted == 0
    run.clock.desk.journal = Journal()
    run.clock.advance()
    assert run.clock.desk.journal.samples == Counter({0: 4})


# Work that is given up


def test_what_is_given_up_is_not_computed_where_that_is_certain():
    run = driven(policy_of("k_sync", k=2), delays_of([1.0, 1.5, 4.0, 5.0]))
    for update in range(1, 6):
        run.go(2)
        assert run.server.version == update
        assert run.clock.desk.journal.wasted == 2 * update
        assert run.clock.now == 1.5 * update
    assert [[member.worker for member in members] for members in run.trained] == [[0, 1]] * 5
    assert run.clock.desk.journal.samples == Counter({0: 18, 1: 18})


def test_of_work_that_arrives_together_no_more_than_is_needed_is_taken_or_computed():
    run = driven(policy_of("k_sync", k=2), delays_of([1.0] * 5))
    run.go(8)
    assert run.server.version == 4
    assert [arrival.slot for arrival in run.arrivals] == [0, 1] * 4
    assert [[member.slot for member in members] for members in run.trained] == [[0, 1]] * 4
    assert run.clock.desk.journal.wasted == 12
    assert run.clock.desk.journal.down == 20
    assert run.clock.desk.journal.up == 8


@pytest.mark.parametrize("name", ["asgd", "fedasync"])
def test_towards_the_end_nothing_is_computed_that_cannot_arrive_any_more(name):
    """Of 10 pieces of work, worker 3 brings one at most: it is the slowest by far, and was computed with the first."""
    delays = [1.0, 1.1234, 1.2817, 1000.0]
    known, endless = (driven(policy_of(name), delays_of(delays), pieces=pieces).go(10) for pieces in (10, 1e9))
    assert known.row.tolist() == endless.row.tolist()
    assert known.arrivals == endless.arrivals
    computed = [sum(map(len, run.trained)) for run in (known, endless)]
    assert computed == [11, 13]
    all_tied = driven(policy_of(name), delays_of([1.0] * 4), pieces=6).go(6)
    assert len(all_tied.arrivals) == sum(map(len, all_tied.trained)) == 8, "what arrives at one time is taken"


def test_work_that_was_given_up_is_begun_anew_with_the_new_model():
    """Worker 2 is too slow twice; its first batch is still to come when the others' second are there."""
    run = driven(policy_of("backup", backups=1), delays_of([1.0, 1.0, 1.5]))
    run.go(4)
    assert run.clock.now == 2.0
    run.clock._departures = {0: 0.0}  # from now on worker 2 is needed
    run.go(2)
    assert run.clock.now == 3.5
    last = {member.worker: member for members in run.trained for member in members}[2]
    assert (last.round, last.step) == (1, 0)


# Workers that leave


def test_what_has_not_arrived_when_its_worker_leaves_never_does():
    run = driven(policy_of("asgd"), delays_of([1.0, 2.0, 100.0]), departures={0: 3.5, 1: 4.0, 2: 3.9})
    with pytest.raises(ExperimentError) as caught:
        run.go(100)
    assert [(arrival.slot, when) for arrival, when in zip(run.arrivals, run.times, strict=True)] == [
        *[(0, 1.0), (0, 2.0), (1, 2.0), (0, 3.0), (1, 4.0)]
    ]
    assert run.clock.desk.journal.wasted == 3
    assert run.clock.desk.journal.samples == Counter({0: 10, 1: 8})
    assert caught.value.lines == (
        "policy: at 4 virtual seconds nobody is at work and nobody may begin; 3 of 3 workers have left "
        "(clock.departures)",
    )
    trained = Counter(member.worker for members in run.trained for member in members)
    assert trained == Counter({0: 3, 1: 2}), "nothing of what never arrives"


def test_who_is_to_leave_may_still_bring_what_it_begins_when_longer_work_was_given_up():
    """Worker 1 would leave at 10 in its first step, which is given up at 1; its second takes half a second."""
    run = driven(policy_of("k_sync", k=1), delays_of([1.0, 1.0]), departures={1: 10.0})
    times = {(0, 0): 1.0, (1, 0): 100.0, (0, 1): 3.0, (1, 1): 0.5}
    run.clock._pace = lambda member, unit, models: times[member.worker, unit]
    run.go(2)
    assert [arrival.slot for arrival in run.arrivals] == [0, 1]
    assert run.times == [1.0, 1.5]
    assert run.server.alive.tolist() == [0, 1]


def test_a_worker_may_leave_before_it_has_begun():
    run = driven(policy_of("asgd"), delays_of([1.0, 2.0]), departures={1: 0.0}).go(5)
    assert {arrival.slot for arrival in run.arrivals} == {0}
    assert run.server.alive.tolist() == [0]


def test_too_few_for_an_update_is_an_error_and_does_not_hang():
    run = driven(policy_of("k_sync", k=2), delays_of([1.0, 1.0, 1.0]), departures={1: 2.5, 2: 2.5})
    with pytest.raises(ExperimentError, match="at 3 virtual seconds nobody is at work and nobody may begin; 2 of 3"):
        run.go(100)
    assert run.server.version == 2
    assert run.server.policy.held(run.server) == 1


# Speed


@pytest.mark.parametrize(("name", "events"), [("nothing", 20_000), ("asgd", 5_000)])
def test_events_cost_little(name, events):
    """100,000 a second where nothing else runs, and policies do nothing; a tenth of that is asked for here."""
    chosen = Counting() if name == "nothing" else policy_of(name)
    run = driven(chosen, delays_of([1.0] * 100, "shifted_exponential"), watched=False, train=None)
    run.go(200)
    start = time.process_time()
    run.go(events)
    assert time.process_time() - start < events / 10_000
