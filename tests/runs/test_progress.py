from __future__ import annotations

import math

import pytest

import fedsim
from fedsim.records.numbers import Progress, progress_of
from fedsim.records.record import RoundRecord, mean_staleness


def asynchronous(round, seconds, updates, arrivals, staleness):
    told = {"updates": updates, "arrivals": arrivals, "staleness": staleness, "buffered": 0, "discarded": 0}
    return RoundRecord(round=round, virtual_seconds=seconds, asynchronous=told, cohort=[0], samples=[5])


def test_the_progress_of_asynchronous_records_and_of_rounds_of_models():
    history = [asynchronous(1, 2.5, 4, 8, {"0": 4}), asynchronous(2, 5.0, 9, 16, {"1": 5})]
    assert progress_of(history, {}) == [(1, 2.5, 4, 8), (2, 5.0, 9, 16)]
    history = [RoundRecord(round=1, cohort=[0, 3]), RoundRecord(round=2, cohort=[1, 2, 4])]
    assert progress_of(history, {"sync": "parameters"}) == [(1, None, 1, 2), (2, None, 2, 5)]


@pytest.mark.parametrize("local", [{"epochs": 1}, {"epochs": 3}, {"steps": 7}])
@pytest.mark.parametrize("sizes", [[20, 33], [5, 1]])
def test_with_gradients_every_step_is_an_update_and_a_trip_of_everyone_in_it(local, sizes):
    batch = 8
    steps = [local.get("steps", local.get("epochs", 0) * math.ceil(size / batch)) for size in sizes]
    samples = [local.get("epochs", 1) * size for size in sizes]
    record = {"cohort": [0, 1], "samples": samples}
    history = [RoundRecord(round=1, **record), RoundRecord(round=2, **record), RoundRecord(round=3, cohort=[])]
    experiment = {"sync": "gradients", "local": {**local, "batch_size": batch}}
    assert progress_of(history, experiment) == [
        Progress(round, None, number * max(steps), number * sum(steps)) for round, number in ((1, 1), (2, 2), (3, 2))
    ]


def test_progress_that_records_do_not_hold_is_none():
    old = RoundRecord(round=1, cohort=[0, 1])
    assert progress_of([old], {"sync": "gradients", "local": {"epochs": 1, "batch_size": 8}}) == [(1, None, None, None)]
    assert progress_of([old], {"sync": "gradients", "local": "sgd"}) == [(1, None, None, None)]
    assert progress_of([old], {}) == [(1, None, 1, 2)]
    without_arrivals = RoundRecord(round=1, virtual_seconds=2.0, asynchronous={"updates": 3})
    assert progress_of([without_arrivals], {}) == [(1, 2.0, 3, None)]


def test_the_mean_staleness_is_over_applied_results():
    record = asynchronous(1, 0.0, 4, 4, {"0": 1, "2": 2, "5": 1})
    assert mean_staleness([record]) == (0 + 2 * 2 + 5) / 4
    assert mean_staleness([record, asynchronous(2, 0.0, 6, 6, {"12": 2})]) == (0 + 2 * 2 + 5 + 2 * 12) / 6
    nothing = [asynchronous(1, 0.0, 0, 1, {}), RoundRecord(round=2), RoundRecord(round=3)]
    assert mean_staleness(nothing) is None
    assert mean_staleness([*nothing, record]) == (0 + 2 * 2 + 5) / 4


@pytest.mark.parametrize("change", [{}, {"sync": "gradients"}, {"policy": "asgd"}], ids=["models", "gradients", "asgd"])
def test_equivalent_policies_have_equal_progress(tiny_experiment, change):
    """With one worker nobody waits: each work item is one arrival and one update."""
    tables = {**tiny_experiment, "workers": 1, "mode": "clock", **change}
    result = fedsim.run(tables)
    steps = 1 if change == {} else math.ceil(203 / 16)
    seconds = [math.ceil(203 / 16) * number for number in (1, 2)]
    points = progress_of(result.history, result.experiment.resolved())
    assert points == [(number, seconds[number - 1], steps * number, steps * number) for number in (1, 2)]


def test_k_sync_counts_only_used_arrivals(tiny_experiment):
    tables = {**tiny_experiment, "mode": "clock", "policy": {"name": "k_sync", "k": 2}, "clock": {"slowdown": "linear"}}
    result = fedsim.run({**tables, "rounds": 3})
    for progress, record in zip(progress_of(result.history, result.experiment.resolved()), result.history, strict=True):
        assert progress.arrivals == 2 * progress.updates + record["asynchronous"]["buffered"]


def test_post_local_sgd_averages_gradients_at_first(tiny_experiment):
    tables = {**tiny_experiment, "rounds": 3, "sync": "post_local", "switch_after_round": 2}
    result = fedsim.run({**tables, "local": {"batch_size": 16, "lr": 0.05}})
    assert [record["cohort"] for record in result.history] == [[0, 1, 2]] * 3
    steps = math.ceil(68 / 16)  # of the 203 samples, two workers have 68 and one has 67
    points = progress_of(result.history, result.experiment.resolved())
    assert [progress.updates for progress in points] == [steps, 2 * steps, 2 * steps + 1]
    assert [progress.arrivals for progress in points] == [3 * steps, 6 * steps, 6 * steps + 3]
