"""Runs whose cohorts are chosen by a strategy, and runs with workers that do not report."""

from __future__ import annotations

from multiprocessing import current_process

import pytest
import torch

import fedsim
from fedsim.core.training import test as loss_of
from fedsim.data.partitions import partition_shards
from fedsim.errors import ExperimentError
from tests import components


@pytest.fixture
def tables(tiny_experiment):
    return {**tiny_experiment, "workers": 6, "cohort": 3, "rounds": 4, "precision": "float64"}


def test_power_of_choice_takes_the_workers_with_the_highest_loss_of_the_global_model(tables):
    tables |= {"rounds": 3, "cohort": 2, "sampling": {"name": "power_of_choice", "candidates": 6}}
    history = fedsim.run(tables).history
    train = components.tiny(None)[0].to(torch.device("cpu"), torch.float64)
    shards = partition_shards(train.targets, "iid", 6, seed=0)
    for rounds in (1, 2):
        model = fedsim.run({**tables, "rounds": rounds}).model
        losses = [loss_of(model, [train.gather(shards.of(worker))]).loss for worker in range(6)]
        best = sorted(range(6), key=losses.__getitem__)[-2:]
        assert history[rounds].cohort == sorted(best)


def test_candidates_receive_the_model(tables):
    plain = fedsim.run({**tables, "rounds": 1}).history[0]
    sampling = {"name": "power_of_choice", "candidates": 5}
    chosen = fedsim.run({**tables, "rounds": 1, "sampling": sampling}).history[0]
    assert chosen.bytes_down * 3 == plain.bytes_down * 5
    assert chosen.bytes_up == plain.bytes_up


def test_the_mean_of_all_cohorts_by_inverse_probability_is_the_mean_of_all_workers(tables):
    """From one start, the moves of two cohorts of probability 1/2 average to the move of all workers."""
    unbiased = {"partition": "tests.components:uneven", "aggregate": {"weights": "inverse_probability"}, "rounds": 1}
    start = fedsim.run({**tables, **unbiased, "local": {"lr": 0.0}}).global_row

    def move(workers):
        sampling = {"name": "tests.components:planned", "cohorts": [workers]}
        return fedsim.run({**tables, **unbiased, "cohort": 3, "sampling": sampling}).global_row - start

    whole = fedsim.run({**tables, "partition": "tests.components:uneven", "rounds": 1, "cohort": 6}).global_row - start
    assert torch.allclose((move([0, 2, 4]) + move([1, 3, 5])) / 2, whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sync", ["parameters", "gradients"])
def test_a_worker_that_drops_out_changes_nothing(tables, sync):
    """The round equals one with only the workers that report."""
    tables |= {"sync": sync, "partition": "tests.components:uneven"}
    result = fedsim.run({**tables, "sampling.dropout_rate": 0.5, "rounds": 1, "seed": 3})
    record = result.history[0]
    assert (len(record.cohort), len(record.dropped)) == (2, 1)
    fixed = {"name": "fixed", "workers": record.cohort}
    same = fedsim.run({**tables, "rounds": 1, "seed": 3, "cohort": 2, "sampling": fixed})
    assert torch.equal(result.global_row, same.global_row)
    assert record.bytes_up == same.history[0].bytes_up
    assert record.bytes_down > same.history[0].bytes_down or sync == "gradients"


def test_the_state_of_a_worker_that_drops_out_is_lost(tables):
    tables |= {"local": {"algorithm": "tests.components:Counting", "batch_size": 16}, "rounds": 5}
    result = fedsim.run({**tables, "sampling.dropout_rate": 0.4})
    assert sum(len(record.dropped) for record in result.history) > 3
    planned = {"name": "tests.components:planned", "cohorts": [record.cohort for record in result.history]}
    assert torch.equal(result.global_row, fedsim.run({**tables, "sampling": planned}).global_row)


@pytest.mark.parametrize("sync", ["parameters", "gradients", "post_local"])
def test_a_round_without_workers_keeps_the_global_model(tables, sync, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("worker,from,to\n0,1,2\n1,1,2\n2,3,5\n")
    tables |= {"sync": sync, "sampling": {"name": "available", "trace": str(path)}}
    tables |= {"switch_after_round": 2, "server": "momentum"} if sync == "post_local" else {}
    history = fedsim.run(tables, tmp_path / "run", records={"updates": [2, 3]}).history
    assert [record.cohort for record in history] == [[0, 1], [], [2], [2]]
    assert history[1].test_loss == history[0].test_loss != history[2].test_loss
    assert history[1].train_loss is None
    assert history[1].bytes_down == 0
    assert [record.metrics["available_workers"] for record in history] == [2, 0, 1, 1]
    assert not (tmp_path / "run" / "updates-00002.safetensors").exists()


def test_a_time_at_which_no_worker_is_available_is_an_error_on_the_clock(tables, tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("worker,from,to\n0,0,3\n1,0,3\n")
    tables |= {"mode": "clock", "sampling": {"name": "available", "trace": str(path)}}
    with pytest.raises(ExperimentError, match=r"^round 2: no worker is available at \d+ virtual seconds"):
        fedsim.run(tables)


def test_a_large_population_costs_what_its_cohort_costs(tables):
    """No strategy reads more shards than those of its cohort or candidates."""
    million = {"workers": 10**6, "cohort": 3, "rounds": 2, "partition": {"name": "virtual", "samples": 30}}
    for sampling in (
        "by_size",
        "round_robin",
        {"name": "fixed", "workers": [5, 999_999, 7]},
        {"name": "power_of_choice", "candidates": 6},
        "daily",
    ):
        history = fedsim.run({**tables, **million, "sampling": sampling}).history
        assert all(len(record.cohort) == 3 for record in history)


FEW = [
    ({"aggregate": {"rule": "krum", "f": 1}}, r"needs n >= 2f \+ 3.* a smaller f .* another aggregate\.rule"),
    (
        {"aggregate": {"rule": "trimmed_mean", "f": 2}, "sync": "gradients"},
        r"2f < n.* a smaller f .* another aggregate\.rule",
    ),
    ({"aggregate": {"rule": "mean", "weights": [1.0, 0, 0, 0, 0, 0]}}, r"weights .* zero.* other aggregate\.weights"),
]


@pytest.mark.parametrize(("changes", "reason"), FEW)
def test_a_round_in_which_too_few_workers_report_gives_a_one_line_error(changes, reason, tables):
    line = rf"^round \d+: sampling.dropout_rate = 0\.5 leaves \d of 6 workers; .*{reason}"
    with pytest.raises(fedsim.ExperimentError, match=line):
        fedsim.run({**tables, **changes, "cohort": 6, "rounds": 20, "sampling.dropout_rate": 0.5})


def of_this_process(n_workers, size, *, others):
    """A strategy that depends on its process: `others` in the second process."""
    return others if current_process().name.endswith("-1") else [0, 1]


@pytest.mark.parametrize("others", [[], [1, 2]])
def test_processes_that_draw_different_cohorts_end_the_run_in_one_line(others, tables):
    sampling = {"name": "tests.runs.test_sampling:of_this_process", "others": others}
    with pytest.raises(fedsim.ExperimentError, match="returned different cohorts in different processes in round 1"):
        fedsim.run(
            {
                **tables,
                "cohort": 2,
                "engine": "processes",
                "processes": 2,
                "process_timeout": 20.0,
                "sampling": sampling,
            }
        )
