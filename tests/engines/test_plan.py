from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from fedsim.engines import plan
from fedsim.engines.operation_check import FlopCount
from fedsim.engines.plan import Workload, execution_plan, plan_processes, simpler

WORK = Workload(
    rounds=10,
    cohort=8,
    row_steps=1_000,
    samples=32_000,
    barriers=1,
    parameters=20_000,
    itemsize=4,
    flops=2e6,
    test_samples=1_000,
)


def seconds_of(**changes):
    return dataclasses.replace(WORK, **changes).seconds_of_a_round


def test_the_estimate_is_the_sum_of_its_parts():
    fixed = 1_000 * plan.STEP_SECONDS
    traffic = 1_000 * 6 * 20_000 * 4 / plan.BYTES_PER_SECOND
    arithmetic = (32_000 + 1_000 / 3) * 2e6 / plan.FLOPS_PER_SECOND
    assert seconds_of() == pytest.approx(fixed + traffic + arithmetic)
    assert seconds_of(itemsize=8) == pytest.approx(fixed + 2 * traffic + 2 * arithmetic)


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)), (3, 6)),
        (nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 2)), (3, 2, 4, 4)),
        (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), (3, 5, 8)),
    ],
    ids=["linear", "convolution", "attention"],
)
def test_operations_are_counted_as_pytorch_counts_them(module, inputs):
    totals = []
    for counter in (FlopCount(), FlopCounterMode(display=False)):
        with counter:
            module(torch.randn(inputs)).square().sum().backward()
        totals.append(counter.total if isinstance(counter, FlopCount) else counter.get_total_flops())
    assert totals[0] == totals[1] > 0


def test_processes_are_used_if_they_save_more_than_their_start_takes():
    saved_in_a_round = WORK.seconds_of_a_round / 2 - plan.BARRIER_SECONDS
    enough = int(plan.START_SECONDS / saved_in_a_round) + 1
    for rounds, expected in ((enough, 2), (enough - 1, 1)):
        processes, reason = plan_processes(dataclasses.replace(WORK, rounds=rounds), 2, stacked=False)
        assert processes == expected
        assert "2 processes would save about" in reason


@pytest.mark.parametrize("unstacked", [None, "it has state"])
def test_on_a_gpu_one_process_trains_whatever_it_costs(unstacked):
    def workload():
        raise AssertionError("nothing has to be counted")

    found = execution_plan(torch.device("cuda", 0), 4, workload, unstacked)
    assert (found.processes, found.stacked) == (1, unstacked is None)
    assert "cuda:0" in found.reason
    long = dataclasses.replace(WORK, rounds=10**6)
    assert execution_plan(torch.device("cpu"), 4, lambda: long, unstacked).processes == 4
    assert execution_plan(torch.device("cpu"), 1, workload, unstacked).processes == 1


def test_after_a_failure_comes_one_process_and_then_single_rows():
    plans = [execution_plan(torch.device("cpu"), 4, lambda: dataclasses.replace(WORK, rounds=10**6))]
    while (after := simpler(plans[-1], "it failed")) is not None:
        plans.append(after)
    assert [(each.processes, each.stacked) for each in plans] == [(4, True), (1, True), (1, False)]
    assert {each.reason for each in plans[1:]} == {"it failed"}


def test_stacks_and_frequent_synchronisation_leave_processes_less_to_save():
    rounds = int(plan.START_SECONDS / (WORK.seconds_of_a_round / 2)) + 1
    work = dataclasses.replace(WORK, rounds=rounds + 1)
    assert plan_processes(work, 2, stacked=False)[0] == 2
    assert plan_processes(work, 2, stacked=True)[0] == 1
    assert plan_processes(dataclasses.replace(work, barriers=1_000), 2, stacked=False)[0] == 1


def test_more_cores_save_more():
    seconds_saved = [
        float(plan_processes(WORK, most, stacked=False)[1].split("about ")[1].split(" s")[0]) for most in (2, 4, 64)
    ]
    assert seconds_saved == sorted(seconds_saved)
