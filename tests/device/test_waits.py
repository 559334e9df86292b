"""Waits for the GPU in a round: their number does not depend on the number of workers, and batches are drawn early."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import fedsim
from fedsim.errors import WorkerError
from fedsim.rounds.synchronous_rounds import SynchronousRounds
from fedsim.server.cohort import sampling_strategy
from fedsim.system.devices import to_device
from fedsim.training.batches import BatchSource
from fedsim.training.stack import Stacks
from tests.device.agreement import ENGINES
from tests.device.pretend import pretend_gpu

FEW, MANY = 4, 10  # workers in a round
CHANCE = 2  # waits and copies that depend on whether the drawn workers happen to be consecutive
LOCAL = {"batch_size": 2, "epochs": 1}
STACKS = {"batched": {"stack_size": 2}}  # the number of stacks grows with the number of workers
NO_GRAPHS = {"cuda_graphs": False}
DROPOUT = {"model": "tests.device.test_waits:with_dropout"}


def algorithm(name):
    return {"local": {**LOCAL, "algorithm": name}}


CASES = {
    "plain": {},
    "without graphs": NO_GRAPHS,
    "drawn epochs": {"local": {**LOCAL, "epochs": {"uniform": [1, 3]}}},
    "numbers of the round": algorithm("fednova"),
    "personal state": algorithm("scaffold"),
    "a personal model": algorithm("ditto"),
    "an attack": {"attack": {"name": "sign_flipping", "fraction": 0.25}, "aggregate": "median"},
    "an attack on data": {"attack": {"name": "label_flipping", "fraction": 0.25}},
    "compression": {"processors": ["natural"]},
    "workers that drop out": {"sampling": {"dropout_rate": 0.2}},
    "gradients": {"sync": "gradients"},
    "stacks": STACKS,
    "stacks without graphs": STACKS | NO_GRAPHS,
    "stacks with dropout": STACKS | DROPOUT,
    "stacks with numbers of the round, without graphs": STACKS | NO_GRAPHS | algorithm("fednova"),
    "stacks with personal state": STACKS | algorithm("scaffold"),
    "stacks with full gradients, without graphs": STACKS | NO_GRAPHS | algorithm("mimelite"),
}


def with_dropout():
    return nn.Sequential(nn.Flatten(), nn.Dropout(0.25), nn.Linear(784, 10))


def tables(workers, **changes):
    return {
        **{"rounds": 3, "workers": 2 * workers, "cohort": workers, "model": "logistic", "partition": "contiguous"},
        **{"data": {"name": "tests.components:tiny", "train": 8 * workers}, "local": LOCAL, "device": "cuda"},
        **{**ENGINES["batched"], **changes},
    }


def counts_of_the_last_round(tables):
    """Return the counts of the last round, in which nothing is prepared for the next one, and of the round before."""
    counts, run_round = [], SynchronousRounds.run_round
    with pretend_gpu() as gpu, pytest.MonkeyPatch.context() as patch:

        def counting(rounds, round):
            with gpu.counting() as of_round:
                result = run_round(rounds, round)
            counts.append(of_round)
            return result

        patch.setattr(SynchronousRounds, "run_round", counting)
        fedsim.run(tables)
    return counts[-2:]


@pytest.mark.parametrize("case", CASES)
def test_waits_and_copies_of_a_round_do_not_grow_with_the_workers(case):
    few, many = (counts_of_the_last_round(tables(workers, **CASES[case])) for workers in (FEW, MANY))
    for of_few, of_many in zip(few, many, strict=True):
        assert of_many.waits <= of_few.waits + CHANCE, of_many.table()
        if "stacks" not in case:
            assert of_many.uploads <= of_few.uploads + CHANCE, of_many.table()


@pytest.mark.parametrize("policy", ["ssp", "easgd", "asgd", "fedbuff", "gossip"])
def test_waits_of_an_asynchronous_round_do_not_grow_with_the_workers(policy):
    """The workers have equal speeds, so their steps are computed together."""
    changes = {"mode": "clock", "clock": {"step_seconds": 1.0}, "policy": policy}
    waits = []
    for workers in (FEW, MANY):
        with pretend_gpu() as gpu, gpu.counting() as counts:
            fedsim.run({**tables(workers, **changes), "workers": workers, "cohort": None})
        waits.append(counts.waits)
    assert waits[1] <= waits[0] + 3 * CHANCE, counts.table()


@pytest.mark.parametrize("device", ["cuda", "cpu"])
@pytest.mark.parametrize("sampling", ["uniform", "fixed"])
@pytest.mark.parametrize("partition", ["contiguous", {"name": "virtual", "samples": 4}])
def test_a_gpu_computes_a_round_while_the_batches_of_the_next_round_are_drawn(device, sampling, partition, monkeypatch):
    """Each round's batches are drawn once. On a CPU, and if the cohort may depend on results, they are not drawn early.

    Only the choice of the workers at random is known to be independent of the results.
    """
    events, waits, methods = [], [], {"orders": BatchSource.orders, "write_losses": Stacks.write_losses}

    def noting(name):
        def method(*arguments):
            events.append(name)
            waits.append(counts.waits)
            return methods[name](*arguments)

        return method

    monkeypatch.setattr("tests.device.pretend.gpu.STAGED_AT_ONCE", 0)  # as if there were many samples
    monkeypatch.setattr(BatchSource, "orders", noting("orders"))
    monkeypatch.setattr(Stacks, "write_losses", noting("write_losses"))
    chosen = {"name": "fixed", "workers": [0, 1, 2, 3]} if sampling == "fixed" else sampling
    with pretend_gpu() as gpu, gpu.counting() as counts:
        fedsim.run(tables(FEW, device=device, sampling=chosen, partition=partition))
    one_after_another = ["orders", "write_losses"] * 3
    early = ["orders", "orders", "write_losses", "orders", "write_losses", "write_losses"]
    is_early = device == "cuda" and sampling == "uniform"
    assert events == (early if is_early else one_after_another)
    for before, after in [(1, 2), (3, 4)] if is_early else []:
        assert waits[before] == waits[after], "the batches were drawn after the host had begun to wait"


def test_the_host_may_change_values_after_they_are_copied_to_the_gpu(gpu):
    values = torch.arange(6.0).pin_memory()
    with gpu.counting() as counts:
        copied = to_device(values[::2], torch.device("cuda", 0))
        values.zero_()
    assert counts.waits == 0
    assert copied.tolist() == [0, 2, 4]


@pytest.fixture
def strategy(request):
    """Register a cohort strategy that claims to be random, which the test's parameter `request.param` implements."""
    sampling_strategy("strategy_of_the_test", amplifies="poisson")(request.param)
    yield "strategy_of_the_test"
    del sampling_strategy._components["strategy_of_the_test"]


def by_time(n_workers, size, now):
    return (np.arange(size) + int(now)) % n_workers


def by_loss(n_workers, size, losses):
    return (-losses(range(n_workers))).argsort()[:size]


@pytest.mark.parametrize("strategy", [by_time, by_loss], indirect=True)
def test_a_strategy_that_reads_results_is_called_after_the_round(strategy):
    changes = {"sampling": strategy, "mode": "clock", "clock": {"step_seconds": 1.0}, "precision": "float64"}
    with pretend_gpu():
        on_gpu = fedsim.run(tables(FEW, **changes))
    on_cpu = fedsim.run(tables(FEW, **changes, device="cpu"))
    cohorts = [[record["cohort"] for record in result.history] for result in (on_gpu, on_cpu)]
    assert cohorts[0] == cohorts[1]
    assert cohorts[0][0] != cohorts[0][1]


def fails_in_the_last_round(n_workers, size, round):
    if round == 3:
        raise ValueError("failed")
    return range(size)


@pytest.mark.parametrize("strategy", [fails_in_the_last_round], indirect=True)
def test_an_error_of_a_strategy_belongs_to_its_round(strategy):
    records = []
    with pretend_gpu(), pytest.raises(WorkerError, match="ValueError: failed"):
        fedsim.run(tables(FEW, sampling=strategy), on_round=records.append)
    assert [record.round for record in records] == [1, 2]
